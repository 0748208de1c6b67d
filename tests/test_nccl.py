"""NCCL's transport: deadlines and what the others do. Groups that never complete, and Gloo, stand
in for NCCL, and memory of the CPU for that of a GPU that two processes share; the tests at the end
need GPUs.
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial

import pytest
import torch

from tests.conftest import wait_until
from tests.helpers import (
    make_gloo_group,
    map_memory_of_cpu,
    needs_gpu,
    run_python,
    running_python,
    share_memory_of_cpu,
)
from verifiers_rl.sync import nccl
from verifiers_rl.sync.plan import TransferPlan, receive_buckets
from verifiers_rl.sync.shared_buffers import GivenUpError
from verifiers_rl.sync.sources import Source, buckets_of

CPU = torch.device("cpu")
BUCKET = torch.zeros(4, dtype=torch.uint8)


class StubGroup:
    """Completes the first `num_complete` messages. With `blocks`, the call itself does not return.

    The last message has `error`. It is its messages' work itself.
    """

    def __init__(self, num_complete=0, blocks=False, error=None):
        self.num_complete, self.blocks, self.error = num_complete, blocks, error
        self.num_aborts = self.num_messages = 0
        self.freed = threading.Event()

    def broadcast(self, tensors, options):
        self.num_messages += 1
        if self.blocks:
            self.freed.wait(30)
        return self

    def is_completed(self):
        return self.num_messages <= self.num_complete

    def wait(self):
        assert self.is_completed(), "wait() has no deadline"
        if self.error is not None and self.num_messages == self.num_complete:
            raise self.error

    def abort(self):
        self.num_aborts += 1


@contextmanager
def ranks(timeout_s=20.0):
    """Yield the ranks' transports, the errors of those that did not connect, and the event that
    says that the push is given up.
    """
    made, errors, given_up = {}, {}, threading.Event()

    def connect(rank, transport):
        try:
            transport.wait_until_connected()
            made[rank] = transport
        except RuntimeError as error:
            errors[rank] = error

    trainer = nccl.ProcessGroupTransport(0, 2, CPU, timeout_s)
    unique_id = trainer.unique_id()
    worker = nccl.ProcessGroupTransport(1, 2, CPU, timeout_s, unique_id, given_up.is_set)
    transports = trainer, worker
    threads = [threading.Thread(target=connect, args=item) for item in enumerate(transports)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    yield made, errors, given_up
    for transport in transports:
        transport.close()


@pytest.fixture
def make_groups(monkeypatch):
    def make_groups(**options):
        """Stub groups, by rank; to be made before the ranks are."""
        found = {rank: StubGroup(**options) for rank in range(2)}

        def make(store, rank, world_size):
            if rank == 0:
                store.set(nccl.ID_KEY, b"the id")
            assert store.get(nccl.ID_KEY) == b"the id"
            return found[rank]

        monkeypatch.setattr(nccl, "make_nccl_group", make)
        return found

    return make_groups


@pytest.mark.parametrize("rank", [0, 1])
def test_a_message_that_never_completes_ends_at_our_deadline_and_is_aborted_once(make_groups, rank):
    groups = make_groups(num_complete=1)
    with ranks(timeout_s=0.5) as (made, _, _):
        transport = made[rank]
        late = r"longer than 0\.5 s \(vllm_server_timeout\)"
        with pytest.raises(nccl.TransportError, match=late):
            transport.receive(4)() if rank else transport.send(BUCKET)
        transport.close()
        transport.abandon()
        assert groups[rank].num_aborts == 1
        with pytest.raises(nccl.TransportError, match="was closed"):
            transport.receive(4)


def test_connecting_has_a_deadline_though_nccls_own_call_blocks(make_groups):
    groups = make_groups(blocks=True)
    with ranks(timeout_s=0.5) as (made, errors, _):
        assert not made and len(errors) == 2
        assert all("connecting over NCCL took longer than 0.5 s" in str(e) for e in errors.values())
        assert [group.num_aborts for group in groups.values()] == [1, 1]
    for group in groups.values():
        group.freed.set()


def test_an_id_that_nccl_does_not_draw_ends_at_the_deadline_or_with_its_error(monkeypatch):
    def fail(*_):
        raise ValueError("no GPU")

    for make, message in (
        (lambda *_: time.sleep(1), r"NCCL's unique id took longer than 0\.2 s"),
        (fail, "NCCL failed: no GPU"),
    ):
        monkeypatch.setattr(nccl, "make_nccl_group", make)
        with pytest.raises(nccl.TransportError, match=message):
            nccl.ProcessGroupTransport(0, 2, CPU, 0.2).unique_id()


def test_what_nccl_reports_is_raised_unless_it_follows_from_another_end(make_groups):
    groups = make_groups(num_complete=2, error=RuntimeError("unhandled cuda error"))
    with ranks() as (made, _, given_up):
        with pytest.raises(nccl.TransportError, match="NCCL failed: unhandled cuda error"):
            made[0].send(BUCKET)
        receive = made[1].receive(4)
        given_up.set()
        with pytest.raises(GivenUpError):
            receive()
        assert groups[0].num_aborts == groups[1].num_aborts == 1


def test_a_message_that_ends_between_two_looks_is_no_failure(make_groups):
    """The server replies when it has the last one, which may be before the trainer's next look."""
    groups = make_groups(num_complete=1)
    with ranks() as (made, _, given_up):
        looks = [False]
        given_up.set()
        groups[1].is_completed = lambda: looks.pop() if looks else True
        assert made[1].receive(4)().shape == (4,)


def test_an_abort_that_hangs_holds_nobody_up(make_groups, monkeypatch, caplog):
    monkeypatch.setattr(nccl, "ABORT_DEADLINE_S", 0.1)
    groups = make_groups(num_complete=1)
    freed = threading.Event()
    groups[0].abort = lambda: freed.wait(30)
    with ranks() as (made, _, _):
        made[0].close()
        assert "did not abort within 0.1 s" in caplog.text
        freed.set()


LEFT = """
import time, torch
from verifiers_rl.sync import nccl

class Group:
    def __init__(self, store, *_): store.set(nccl.ID_KEY, b"id")
    def broadcast(self, *_): return self
    def abort(self):
        time.sleep(0.3)
        print("aborted", flush=True)

transport = nccl.ProcessGroupTransport(0, 2, torch.device("cpu"), 9.0, make_group=Group)
transport.unique_id()
transport.abandon()
"""


def test_a_process_ends_behind_an_abort_that_runs():
    assert run_python("-c", LEFT).stdout == "aborted\n"


@pytest.fixture
def shared_bucket(monkeypatch):
    """The transports get a bucket of 32 bytes that both map, as on one GPU."""
    monkeypatch.setattr(nccl, "share", share_memory_of_cpu)
    monkeypatch.setattr(nccl, "map_in", map_memory_of_cpu)
    monkeypatch.setattr(nccl, "make_nccl_group", partial(nccl.SharedBucket, CPU, 32))


@pytest.mark.parametrize("place", [0, 15, 16, 23, None])  # of the bucket, or of its checksum
def test_a_bucket_with_another_byte_than_was_sent_is_refused(shared_bucket, place):
    plan = TransferPlan(tensors={"a": (4,)}, dtype="float32", bucket_bytes=16)
    weights = torch.full((16,), 3, dtype=torch.uint8).view(torch.float32)
    source = Source((4,), torch.float32, lambda: weights)
    (packed,) = buckets_of(plan, {"a": source}, torch.nn.Linear(1, 1))
    with ranks() as (made, _, _), ThreadPoolExecutor(1) as thread:
        sending = thread.submit(made[0].send, packed)
        group = made[0]._group
        wait_until(lambda: group._counts[0] == 2)  # the first message connects
        # Behind the bucket is its checksum: the sum of two words of 0x0303..., with inverted bits.
        assert group._bucket.tolist() == [3] * 16 + [0xF9] * 8 + [0] * 8
        if place is None:
            group._bucket.zero_()  # as memory that nobody has written
        else:
            group._bucket[place] += 1
        with pytest.raises(RuntimeError, match=r"other bytes than were sent \(checksum\)"):
            list(receive_buckets(plan, made[1].receive))
        sending.result(10)


def test_torch_is_told_to_leave_errors_to_us_while_the_group_is_made(monkeypatch):
    made = {}

    class Group:
        class Options:
            pass

        def __init__(self, store, rank, world_size, options):
            made.update({name: os.environ[name] for name in nccl.ERRORS_ARE_OURS})
            made["timeout"] = options._timeout

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    nccl.make_nccl_group(None, 0, 2)
    assert made == {"timeout": nccl.GROUP_TIMEOUT} | nccl.ERRORS_ARE_OURS
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"  # as other groups want it


WORKER = """
import sys, torch
from tests.helpers import make_gloo_group
from verifiers_rl.sync import nccl

device = torch.device(sys.argv[1])
if device.type == "cpu":
    nccl.make_nccl_group = make_gloo_group
transport = nccl.ProcessGroupTransport(1, 2, device, 60.0, bytes.fromhex(sys.stdin.readline()))
transport.wait_until_connected()
print(transport.receive(4)().tolist(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("over", ["gloo", pytest.param("nccl", marks=needs_gpu)])
def test_a_worker_joins_by_the_id_alone_and_its_death_does_not_end_the_trainer(monkeypatch, over):
    ours = theirs = "cpu"
    if over == "nccl":
        # Two ranks on the only GPU are as two machines for NCCL, or it would refuse them.
        ours, theirs = "cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}"
        monkeypatch.setenv("NCCL_HOSTID", "trainer")
    else:
        monkeypatch.setattr(nccl, "make_nccl_group", make_gloo_group)
    transport = nccl.ProcessGroupTransport(0, 2, torch.device(ours), 60.0)
    unique_id = transport.unique_id()
    assert len(unique_id) == nccl.ID_BYTES
    with (
        closing(transport),
        running_python("-c", WORKER, theirs, NCCL_HOSTID="server") as worker,
    ):
        worker.stdin.write(unique_id.hex() + "\n")
        worker.stdin.flush()
        transport.wait_until_connected()
        transport.send(torch.tensor([1, 2, 3, 4], dtype=torch.uint8, device=ours))
        assert worker.stdout.readline() == "[1, 2, 3, 4]\n"
        worker.kill()
        buffer = torch.zeros(2**26, dtype=torch.uint8, device=ours)
        with pytest.raises(nccl.TransportError, match="NCCL failed"):  # not our deadline
            transport.send(buffer)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bucket_that_the_other_side_does_not_take_or_fill_ends_the_wait(shared_bucket, rank):
    with (
        ranks(timeout_s=0.5) as (made, _, _),
        pytest.raises(nccl.TransportError, match=r"took longer than 0\.5 s"),
    ):
        made[1].receive(4)() if rank else made[0].send(BUCKET)
