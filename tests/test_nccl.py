"""NCCL's transport: deadlines and what the others do. Groups that never complete, and Gloo, stand
in for NCCL; the tests at the end need GPUs.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tests.helpers import ROOT, make_gloo_group
from verifiers_rl.sync.transports import Meeting, make_transport, nccl

CPU = torch.device("cpu")


class StubWork:
    def __init__(self, is_complete, error=None):
        self.is_complete, self.error = is_complete, error

    def is_completed(self):
        return self.is_complete

    def wait(self):
        assert self.is_complete, "wait() has no deadline"
        if self.error is not None:
            raise self.error


class StubGroup:
    """Completes the first `num_complete` messages. With `blocks`, the call itself does not return.

    The last message has `error`.
    """

    def __init__(self, num_complete=0, blocks=False, error=None):
        self.num_complete, self.blocks, self.error = num_complete, blocks, error
        self.num_aborts = self.num_messages = 0
        self.freed = threading.Event()

    def broadcast(self, tensors, options):
        self.num_messages += 1
        if self.blocks:
            self.freed.wait(30)
        error = self.error if self.num_messages == self.num_complete else None
        return StubWork(self.num_messages <= self.num_complete, error)

    def abort(self):
        self.num_aborts += 1


@contextmanager
def a_meeting(timeout_s=20.0, num_workers=1):
    """Yield what makes a rank's transport; all are made at once, each in a thread."""
    made, errors, threads = {}, {}, {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def make(rank):
            meeting = Meeting("127.0.0.1", port, "secret", rank, 1 + num_workers, timeout_s)
            try:
                made[rank] = make_transport("nccl", meeting, CPU, None if rank else listener)
            except RuntimeError as error:
                errors[rank] = error

        for rank in range(1 + num_workers):
            threads[rank] = threading.Thread(target=make, args=(rank,))
            threads[rank].start()
        for thread in threads.values():
            thread.join(30)
        yield made, errors
    for transport in made.values():
        transport.close()


@pytest.fixture
def groups(monkeypatch):
    """Stub groups of the ranks, by rank; to be filled before a meeting."""
    found = {}
    monkeypatch.setattr(nccl, "make_nccl_group", lambda store, rank, world_size: found[rank])
    return found


def error_of(work):
    """Run `work`; return its RuntimeError and the seconds that it took."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        work()
    return raised.value, time.monotonic() - start


@pytest.mark.parametrize("sends", [True, False])
def test_a_message_that_never_completes_ends_at_our_deadline_and_is_aborted_once(groups, sends):
    groups |= {rank: StubGroup(num_complete=1) for rank in (0, 1)}
    with a_meeting(timeout_s=0.5) as (made, _):
        rank = 0 if sends else 1
        transport = made[rank]
        work = (lambda: transport.send(transport.buffer(4))) if sends else transport.receive(4)
        error, seconds = error_of(work)
        assert "over NCCL took longer than 0.5 s (vllm_server_timeout)" in str(error)
        assert 0.4 < seconds < 10
        transport.close()
        transport.abandon()
        assert groups[rank].num_aborts == 1
        assert "was closed" in str(error_of(lambda: transport.receive(4))[0])


@pytest.mark.parametrize("blocks", [True, False])
def test_connecting_has_a_deadline_though_nccls_own_call_blocks(groups, blocks):
    groups |= {rank: StubGroup(blocks=blocks) for rank in (0, 1)}
    start = time.monotonic()
    with a_meeting(timeout_s=0.5) as (made, errors):
        assert not made and time.monotonic() - start < 10
        assert any("connecting over NCCL took longer than 0.5 s" in str(e) for e in errors.values())
        assert [group.num_aborts for group in groups.values()] == [1, 1]
    for group in groups.values():
        group.freed.set()


def test_a_group_that_is_made_after_its_meeting_was_given_up_is_aborted(groups, monkeypatch):
    late = threading.Event()
    groups |= {rank: StubGroup() for rank in (0, 1)}

    def make_late(store, rank, world_size):
        late.wait(30)
        return groups[rank]

    monkeypatch.setattr(nccl, "make_nccl_group", make_late)
    with a_meeting(timeout_s=0.3) as (made, errors):
        assert not made and len(errors) == 2
        late.set()
        deadline = time.monotonic() + 20
        while any(not group.num_aborts for group in groups.values()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not any(group.num_messages for group in groups.values())


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_who_gives_up_is_heard_within_a_second_by_all_others(groups, leaver):
    groups |= {rank: StubGroup(num_complete=1) for rank in (0, 1, 2)}
    with a_meeting(timeout_s=30, num_workers=2) as (made, errors):
        assert not errors
        found = {}

        def wait(rank, work):
            found[rank] = error_of(work)

        threads = []
        for rank in {0, 1, 2} - {leaver}:
            transport = made[rank]
            work = transport.receive(4) if rank else lambda: made[0].send(made[0].buffer(4))
            threads.append(threading.Thread(target=wait, args=(rank, work)))
            threads[-1].start()
        made[leaver].close()
        for thread in threads:
            thread.join(20)
        for rank, (error, seconds) in found.items():
            assert type(error).__name__ == "OthersLeftError" and seconds < 1
            who = "the trainer left, or closed because another" if rank else "a worker of the serv"
            assert str(error).startswith(who)
            assert groups[rank].num_aborts == 1


def test_what_nccl_reports_is_raised_and_ends_the_meeting(groups):
    groups |= {
        0: StubGroup(num_complete=2, error=RuntimeError("unhandled cuda error")),
        1: StubGroup(num_complete=1),
    }
    with a_meeting() as (made, _):
        receive = made[1].receive(4)
        error, _ = error_of(lambda: made[0].send(made[0].buffer(4)))
        assert str(error) == "NCCL failed: unhandled cuda error"
        assert error_of(receive)[1] < 1
        assert groups[0].num_aborts == groups[1].num_aborts == 1


def test_a_transport_that_is_abandoned_stops_waiting(groups):
    groups |= {rank: StubGroup(num_complete=1) for rank in (0, 1)}
    with a_meeting() as (made, _):
        found = []
        work = made[0].buffer(4)
        thread = threading.Thread(target=lambda: found.append(error_of(lambda: made[0].send(work))))
        thread.start()
        made[0].abandon()
        thread.join(20)
        assert "closed" in str(found[0][0])


def test_an_abort_that_hangs_holds_nobody_up(groups, monkeypatch, caplog):
    monkeypatch.setattr(nccl, "ABORT_DEADLINE_S", 0.1)
    groups |= {rank: StubGroup(num_complete=1) for rank in (0, 1)}
    freed = threading.Event()
    groups[0].abort = lambda: freed.wait(30)
    with a_meeting() as (made, _):
        made[0].close()
        assert "did not abort within 0.1 s" in caplog.text
        freed.set()


def test_torch_is_told_to_leave_errors_to_us_while_the_group_is_made(monkeypatch):
    made = {}

    class Group:
        class Options:
            pass

        def __init__(self, store, rank, world_size, options):
            made.update(
                timeout=options._timeout, **{n: os.environ[n] for n in nccl.ERRORS_ARE_OURS}
            )

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    nccl.make_nccl_group(None, 0, 2)
    assert made == {"timeout": nccl.GROUP_TIMEOUT} | nccl.ERRORS_ARE_OURS
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"  # as other groups want it
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


OTHER_SIDE = """
import socket, sys, torch
from tests.helpers import make_gloo_group
from verifiers_rl.sync.transports import Meeting, make_transport, nccl

port, rank, device = int(sys.argv[1]), int(sys.argv[2]), torch.device(sys.argv[3])
if device.type == "cpu":
    nccl.make_nccl_group = make_gloo_group
listener = None
if rank == 0:
    listener = socket.create_server(("127.0.0.1", port))
    print("listening", flush=True)
transport = make_transport(
    "nccl", Meeting("127.0.0.1", port, "secret", rank, 2, 60.0), device, listener
)
if rank:
    print(transport.receive(4)().tolist(), flush=True)
else:
    transport.send(torch.tensor([1, 2, 3, 4], dtype=torch.uint8, device=device))
    print("sent", flush=True)
sys.stdin.read()
"""

needs_two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank"),
]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["worker", "trainer"])
@pytest.mark.parametrize("over", ["gloo", pytest.param("nccl", marks=needs_two_gpus)])
def test_a_process_killed_in_mid_push_leaves_the_other_side_alive(monkeypatch, over, killed):
    ours, theirs = ("cpu", "cpu") if over == "gloo" else ("cuda:0", "cuda:1")
    if over == "gloo":
        monkeypatch.setattr(nccl, "make_nccl_group", make_gloo_group)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        rank = 0 if killed == "worker" else 1
        if rank:
            listener.close()  # the other side listens there
        other = subprocess.Popen(
            [sys.executable, "-c", OTHER_SIDE, str(port), str(1 - rank), theirs],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            if rank:
                assert other.stdout.readline() == "listening\n"
            meeting = Meeting("127.0.0.1", port, "secret", rank, 2, 60.0)
            device = torch.device(ours)
            transport = make_transport("nccl", meeting, device, None if rank else listener)
            if rank:
                assert transport.receive(4)().tolist() == [1, 2, 3, 4]
                assert other.stdout.readline() == "sent\n"
                work = transport.receive(2**26)
            else:
                transport.send(torch.tensor([1, 2, 3, 4], dtype=torch.uint8, device=device))
                assert other.stdout.readline() == "[1, 2, 3, 4]\n"
                work = partial(transport.send, transport.buffer(2**26))
            killer = threading.Timer(0.2, other.send_signal, [signal.SIGKILL])
            killer.start()
            error, seconds = error_of(work)
            killer.join()
            assert seconds < 10, error
            assert "left" in str(error) or "NCCL failed" in str(error)
            transport.close()
        finally:
            other.kill()
            other.communicate()
