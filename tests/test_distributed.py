"""What two ranks get of a batch: gloo, on the CPU."""

import pytest

from tests.helpers import run_script

SCRIPT = """
import sys
from dataclasses import astuple
from types import SimpleNamespace
import numpy as np
import torch
from torch import distributed
from tests.helpers import make_samples, values_of
from verifiers_rl import RLConfig
from verifiers_rl.distributed import (
    HostGroup, broadcast_batch, broadcast_values, connect_hosts, failing_together,
    let_gloo_threads_finish,
)
from verifiers_rl.report.metrics import TOKEN_VALUES, TokenValues
from verifiers_rl.types import Batch, Rollout

connect_hosts(RLConfig(use_cpu=True))
rank, cpu = distributed.get_rank(), torch.device("cpu")
samples = make_samples(9, seed=3)  # the same on both ranks, to compare with
samples[4].loss_mask[:] = False
for sample in samples[::2]:
    sample.extras["of_a_fork"] = np.arange(2 * len(sample.token_ids), dtype=np.int16).reshape(-1, 2)
rollouts = [Rollout(0, "", samples=samples[:2]), Rollout(0, "", samples=samples[2:])]
whole = Batch(7, 6, samples, rollouts)
batch = broadcast_batch(whole if rank == 0 else None)
assert (batch.step, batch.policy_version) == (7, 6)
assert batch.num_loss_tokens == whole.num_loss_tokens
for here, there in zip(astuple(batch.sizes), astuple(whole.sizes), strict=True):
    assert np.array_equal(here, there)
for sample, same in zip(batch.samples, samples, strict=True):
    assert values_of(sample) == values_of(same)
    if "of_a_fork" in same.extras:
        assert np.array_equal(sample.extras["of_a_fork"], same.extras["of_a_fork"])
# Each rank has values of its own samples, and gets those of all that are chosen.
batch = broadcast_batch(Batch(7, 6, samples) if rank == 0 else None)
chosen = np.arange(9) % 3 > 0
values = TokenValues(batch, chosen, cpu)
for i in range(rank, 8, 2):  # no rank computes the last one
    num = samples[i].num_loss_tokens
    numbers = torch.arange(num) + 100.0 * i
    inputs = SimpleNamespace(trainer_logprobs=numbers, entropy=-numbers)
    masked = {"masked_share/x": (numbers == 100 * i).float()}
    values.add([i] * bool(num), inputs, masked)
values.collect()
have = [i for i in range(9) if TOKEN_VALUES[0] in batch.samples[i].extras]
assert have == [1, 2, 4, 5, 7, 8]
for i in have:
    whole = np.stack([batch.samples[i].extras[name] for name in TOKEN_VALUES])
    assert np.isnan(whole[:, ~samples[i].loss_mask]).all()
    found = whole[:, samples[i].loss_mask]
    num = samples[i].num_loss_tokens
    expected = np.stack([np.arange(num) + 100 * i, -np.arange(num) - 100 * i,
                         np.arange(num) == 0])
    assert np.array_equal(found, expected) if i < 8 else np.isnan(found).all() and num
empty = broadcast_batch(Batch(8, 7, []) if rank == 0 else None)
assert empty.num_loss_tokens == 0 and not empty.samples
try:
    with failing_together():
        assert rank > 0, "rank 0's own"
    raised = ""
except (AssertionError, RuntimeError) as error:
    raised = str(error)
assert raised == ("rank 0's own" if rank == 0 else
                  "rank 0 has failed; its error is in its own output")
with failing_together():  # nobody fails
    pass
assert broadcast_values({"a": [1.5, "ß"]} if rank == 0 else {}) == {"a": [1.5, "ß"]}
hosts = HostGroup(1.0, 2.0)
if rank == 1:
    try:
        hosts.broadcast(None)
        raised = ""
    except RuntimeError as error:
        raised = str(error)
    assert raised.startswith("waiting for rank 0, whose own output says what"), raised
distributed.barrier()  # only here rank 0 goes on
distributed.destroy_process_group()
let_gloo_threads_finish()
"""


@pytest.mark.slow
def test_each_rank_gets_the_batch_and_the_values_of_its_tokens(tmp_path):
    run_script(tmp_path, SCRIPT)


WAITS = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import tests.sharding_on_cpu
from torch import distributed
from tests.helpers import StubSink, StubSource, load_example, make_tiny_model
from verifiers_rl import RLConfig, RLTrainer

(folder,) = sys.argv[1:]
TIMEOUT_S = 10
# transformers passes ddp_timeout on to NCCL only.
distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
ended = Path(folder, "ended")


class SlowSource(StubSource):
    def start(self):
        time.sleep(1.5 * TIMEOUT_S)
        super().start()

    def get(self):
        batch = super().get()
        time.sleep(1.5 * TIMEOUT_S * (batch.step == 0))
        return batch


class Hangs(RLTrainer):
    def microbatch_loss(self, *args):
        if self.state.global_step == 1 and self.args.process_index == 1:
            until = time.monotonic() + 12 * TIMEOUT_S
            while not ended.exists() and time.monotonic() < until:
                time.sleep(0.1)
            os._exit(0)
        return super().microbatch_loss(*args)


args = RLConfig(
    output_dir=f"{folder}/run", use_cpu=True, use_lora=False, batch_size=8, rollouts_per_example=4,
    max_seq_len=32, max_steps=2, disable_tqdm=True, max_off_policy_steps=0, save_strategy="no",
    ddp_timeout=TIMEOUT_S, fsdp=True, fsdp_config={"version": 2},
)
trainer = Hangs(
    make_tiny_model(), None, args, load_example("warm_start").make_tokenizer(),
    orchestrator=SlowSource(8), weight_sync=StubSink(),
)
try:
    trainer.train()
except RuntimeError as error:
    said = f"step {trainer.state.global_step}: {error}"
ended.write_text(said)
os._exit(0)
"""


@pytest.mark.slow
def test_ranks_wait_for_rollouts_beyond_ddp_timeout_and_for_each_other_until_then(tmp_path):
    run_script(tmp_path, WAITS, tmp_path)
    said = (tmp_path / "ended").read_text()
    assert said.startswith("step 1: ") and "10000ms" in said, said
