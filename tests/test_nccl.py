"""NCCL's transport: deadlines and what the others do. Groups that never complete, and Gloo, stand
in for NCCL; the test at the end needs a GPU.
"""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from tests.helpers import (
    ROOT,
    make_gloo_group,
    run_python,
)
from verifiers_rl.sync import nccl
from verifiers_rl.sync.shared_buffers import GivenUpError

CPU = torch.device("cpu")
BUCKET = torch.zeros(4, dtype=torch.uint8)


class StubGroup:
    """Completes the first `num_complete` messages, the last of which has `error`. It is its
    messages' work itself.
    """

    def __init__(self, num_complete=0, error=None):
        self.num_complete, self.error = num_complete, error
        self.num_aborts = self.num_messages = 0

    def broadcast(self, tensors, options):
        self.num_messages += 1
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
    """Yield the transports of two ranks that have connected, and the event that says that the push
    is given up.
    """
    given_up = threading.Event()
    trainer = nccl.NcclTransport(0, 2, CPU, timeout_s)
    worker = nccl.NcclTransport(1, 2, CPU, timeout_s, trainer.unique_id(), given_up.is_set)
    made = trainer, worker
    with ThreadPoolExecutor() as threads:
        list(threads.map(nccl.NcclTransport.wait_until_connected, made))
    yield made, given_up
    for transport in made:
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
    with ranks(timeout_s=0.5) as (made, _):
        transport = made[rank]
        with pytest.raises(nccl.NcclError, match=r"longer than 0\.5 s \(vllm_server_timeout\)"):
            transport.receive(4)() if rank else transport.send(BUCKET)
        transport.close()
        transport.abandon()
        assert groups[rank].num_aborts == 1
        with pytest.raises(nccl.NcclError, match="was closed"):
            transport.receive(4)


def test_an_id_that_nccl_does_not_draw_ends_at_the_deadline_or_with_its_error(monkeypatch):
    def fail(*_):
        raise ValueError("no GPU")

    for make, message in (
        (lambda *_: time.sleep(1), r"NCCL's unique id took longer than 0\.2 s"),
        (fail, "NCCL failed: no GPU"),
    ):
        monkeypatch.setattr(nccl, "make_nccl_group", make)
        with pytest.raises(nccl.NcclError, match=message):
            nccl.NcclTransport(0, 2, CPU, 0.2).unique_id()


def test_what_nccl_reports_is_raised_unless_it_follows_from_another_end(make_groups):
    groups = make_groups(num_complete=2, error=RuntimeError("unhandled cuda error"))
    with ranks() as (made, given_up):
        with pytest.raises(nccl.NcclError, match="NCCL failed: unhandled cuda error"):
            made[0].send(BUCKET)
        receive = made[1].receive(4)
        given_up.set()
        with pytest.raises(GivenUpError):
            receive()
        assert groups[0].num_aborts == groups[1].num_aborts == 1


def test_an_abort_that_hangs_holds_nobody_up(make_groups, monkeypatch, caplog):
    monkeypatch.setattr(nccl, "ABORT_DEADLINE_S", 0.1)
    groups = make_groups(num_complete=1)
    freed = threading.Event()
    groups[0].abort = lambda: freed.wait(30)
    with ranks() as (made, _):
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

transport = nccl.NcclTransport(0, 2, torch.device("cpu"), 9.0, make_group=Group)
transport.unique_id()
transport.abandon()
"""


def test_a_process_ends_behind_an_abort_that_runs():
    assert run_python("-c", LEFT).stdout == "aborted\n"


WORKER = """
import sys, torch
from tests.helpers import make_gloo_group
from verifiers_rl.sync import nccl

device = torch.device(sys.argv[1])
if device.type == "cpu":
    nccl.make_nccl_group = make_gloo_group
transport = nccl.NcclTransport(1, 2, device, 60.0, bytes.fromhex(sys.stdin.readline()))
transport.wait_until_connected()
print(transport.receive(4)().tolist(), flush=True)
sys.stdin.readline()
"""

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="NCCL needs a GPU"),
]


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
    transport = nccl.NcclTransport(0, 2, torch.device(ours), 60.0)
    unique_id = transport.unique_id()
    assert len(unique_id) == nccl.ID_BYTES
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, theirs],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        | {"NCCL_HOSTID": "server"},
    )  # fmt: skip
    try:
        worker.stdin.write(unique_id.hex() + "\n")
        worker.stdin.flush()
        transport.wait_until_connected()
        transport.send(torch.tensor([1, 2, 3, 4], dtype=torch.uint8, device=ours))
        assert worker.stdout.readline() == "[1, 2, 3, 4]\n"
        worker.kill()
        buffer = torch.zeros(2**26, dtype=torch.uint8, device=ours)
        with pytest.raises(nccl.NcclError, match="NCCL failed"):  # not our deadline
            transport.send(buffer)
    finally:
        transport.close()
        worker.kill()
        worker.communicate()
