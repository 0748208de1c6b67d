import socket
import threading
import time
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from verifiers_rl.process.connections import MeetingError, close_all
from verifiers_rl.sync.transports.meeting import (
    GuestStore,
    HostStore,
    host_meeting,
    join_meeting,
    new_secret,
)


class Host(threading.Thread):
    """A trainer that waits for its workers."""

    def __init__(self, num_workers, secret, timeout_s=20.0):
        super().__init__()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.arguments = (num_workers, secret, timeout_s)
        self.connections, self.error = [], None
        self.start()

    def run(self):
        try:
            self.connections = host_meeting(self.listener, *self.arguments)
        except MeetingError as error:
            self.error = error

    def join_worker(self, rank, secret, timeout_s=20.0):
        return join_meeting("127.0.0.1", self.port, rank, secret, timeout_s)


def test_connections_come_in_the_order_of_ranks():
    secret = new_secret()
    host = Host(2, secret)
    workers = [host.join_worker(rank, secret) for rank in (2, 1)]
    host.join(20)
    for connection, text in zip(host.connections, (b"one", b"two"), strict=True):
        connection.sendall(text)
    assert [worker.recv(3) for worker in workers] == [b"two", b"one"]
    close_all([*host.connections, *workers])


def test_a_stranger_gets_nothing_and_takes_no_workers_place():
    secret = new_secret()
    host = Host(1, secret)
    silent = socket.create_connection(("127.0.0.1", host.port))  # the door stays open meanwhile
    with pytest.raises(MeetingError, match="hung up"):
        host.join_worker(1, "guessed")
    with closing(socket.create_connection(("127.0.0.1", host.port))) as stranger:
        stranger.settimeout(20)
        assert len(stranger.recv(1024)) == 32  # numbers of which nothing follows
        stranger.sendall(bytes(4 + 32 + 32))
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass  # as good
    assert host.is_alive()
    worker = host.join_worker(1, secret)
    host.join(20)
    with pytest.raises((MeetingError, ConnectionRefusedError)):
        host.join_worker(1, secret)  # its place is taken, and the door closed
    (connection,) = host.connections
    connection.sendall(b"weights")
    assert worker.recv(7) == b"weights"
    silent.close()
    close_all([connection, worker])


def test_a_proof_that_was_overheard_is_worth_nothing_at_another_time():
    secret = new_secret()
    hosts = [Host(1, secret), Host(1, secret, timeout_s=1.0)]
    with closing(socket.create_server(("127.0.0.1", 0))) as middle:
        port = middle.getsockname()[1]
        heard = []

        def listen_in():
            connection, _ = middle.accept()
            with connection, closing(socket.create_connection(("127.0.0.1", hosts[0].port))) as one:
                connection.sendall(one.recv(32))
                heard.append(connection.recv(1024))
                one.sendall(heard[0])
                connection.sendall(one.recv(32))

        thread = threading.Thread(target=listen_in)
        thread.start()
        worker = join_meeting("127.0.0.1", port, 1, secret, 20.0)
        thread.join(20)
    with closing(socket.create_connection(("127.0.0.1", hosts[1].port))) as replay:
        replay.settimeout(20)
        replay.recv(32)
        replay.sendall(heard[0])
        try:
            assert replay.recv(1) == b""
        except ConnectionResetError:
            pass  # as good
    for host in hosts:
        host.join(20)
    assert "0 of 1 workers" in str(hosts[1].error)
    close_all([worker, *hosts[0].connections])


def test_a_worker_does_not_take_a_stranger_for_the_trainer():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def pretend():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(1024)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(MeetingError, match="is not this run's trainer"):
            join_meeting("127.0.0.1", listener.getsockname()[1], 1, new_secret(), 20.0)
        thread.join(20)


def test_a_meeting_says_how_many_came():
    start = time.monotonic()
    host = Host(2, "secret", timeout_s=0.5)
    worker = host.join_worker(1, "secret")
    host.join(20)
    assert "1 of 2 workers of the server came within 0.5 s" in str(host.error)
    assert time.monotonic() - start < 10
    assert worker.recv(1) == b""  # it is not left waiting
    worker.close()


@pytest.fixture
def stores():
    secret = new_secret()
    host = Host(1, secret)
    worker = host.join_worker(1, secret)
    host.join(20)
    found = (HostStore(host.connections, 5.0), GuestStore(worker, 5.0))
    yield found
    for store in found:
        store.close()


def test_both_sides_of_a_store_see_the_same(stores):
    for one, other in (stores, stores[::-1]):
        one.set("a", b"\x00\xff")
        assert other.get("a") == b"\x00\xff"
        assert other.add("n", 2) == 2 and one.add("n", 1) == 3
        assert one.check(["a", "n"]) and not other.check(["a", "none"])
        assert other.delete_key("a") and one.delete_key("n") and not one.check(["a"])
    later = threading.Timer(0.1, stores[0].set, ("later", "x"))
    later.start()
    assert stores[1].get("later") == b"x"
    later.join()


def test_who_waits_in_a_store_hears_that_the_others_are_gone(stores):
    host, guest = stores
    guest.close()
    with pytest.raises(MeetingError, match="a worker of the server left"):
        host.wait(["never"])
    with pytest.raises(MeetingError, match="the trainer left"):
        guest.get("never")


def test_torchs_process_groups_meet_in_a_store(stores):
    # gloo here; NCCL, which needs GPUs, uses the same methods.
    results = {}

    def broadcast(rank):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(stores[rank], rank, 2, options)
        tensor = torch.full((3,), float(rank))
        root = dist.BroadcastOptions()
        root.rootRank = 0
        group.broadcast([tensor], root).wait()
        results[rank] = tensor.tolist()

    threads = [threading.Thread(target=broadcast, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {0: [0.0] * 3, 1: [0.0] * 3}
