"""A signal or an error that one of two ranks gets: gloo, on the CPU."""

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from tests.helpers import (
    TWO_RANKS,
    make_tiny_model,
    run_python,
    run_script,
    skip_without_deepspeed,
    write_model,
)
from verifiers_rl.report.run_folder import read_metrics

SCRIPT = """
import os, signal, sys
from pathlib import Path
import tests.sharding_on_cpu
import torch
from accelerate.state import AcceleratorState
from tests.helpers import StubSink, StubSource, load_example
from verifiers_rl import RLConfig, RLTrainer
from verifiers_rl.process.interrupts import Interrupted

folder, kind = sys.argv[1:]
sharding = {}
if kind == "fsdp2":
    sharding = {"fsdp": True, "fsdp_config": {"version": 2}}
elif kind.startswith("zero"):
    stage = {"stage": int(kind[-1]), "stage3_param_persistence_threshold": 0,
             "stage3_gather_16bit_weights_on_model_save": True}
    sharding = {"deepspeed": {
        "zero_optimization": stage, "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto", "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"},
    }}


class Sink(StubSink):
    lora_sync = "merged"


class Ends(RLTrainer):
    signalled = None  # the rank that gets a signal in its first microbatch of the third step
    begun = 0

    def microbatch_loss(self, *args):
        if self.state.global_step == 2:
            self.begun += 1
            if self.begun == 1 and self.args.process_index == self.signalled:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().microbatch_loss(*args)


def run(name, signalled=None, resume=False):
    args = RLConfig(
        output_dir=f"{folder}/{name}", use_cpu=True, use_lora=True, batch_size=16, lora_rank=4,
        rollouts_per_example=4, lora_sync="merged", max_tokens_per_microbatch=24, max_seq_len=32,
        max_steps=4, disable_tqdm=True, learning_rate=2e-3, save_steps=100, max_off_policy_steps=0,
        save_final="merged", eval_strategy="steps", eval_steps=2,
        **sharding,
    )
    torch.manual_seed(0)
    trainer = Ends(
        f"{folder}/base", None, args, load_example("warm_start").make_tokenizer(),
        orchestrator=StubSource(16), weight_sync=Sink(),
    )
    trainer.signalled = signalled
    try:
        trainer.train(resume_from_checkpoint=resume)
        ended = "finished"
    except Interrupted as interrupted:
        ended = f"status {interrupted.code}"
    Path(folder, f"{name}-{args.process_index}-{resume}").write_text(f"{ended} {trainer.begun}")
    AcceleratorState._reset_state()


run("straight")
run("interrupted", signalled=1)
run("interrupted", resume=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(tmp_path, kind):
    skip_without_deepspeed(kind)
    write_model(tmp_path / "base")
    said = run_script(tmp_path, SCRIPT, tmp_path, kind)
    ended = [(tmp_path / f"interrupted-{rank}-False").read_text() for rank in (0, 1)]
    assert ended[0].startswith("status 143") and ended[1] == ended[0]
    begun = int(ended[0].split()[-1])
    rows = read_metrics(tmp_path / "straight")
    assert 1 <= begun <= 2 < rows[2]["num_microbatches"]  # not the whole step
    folder = tmp_path / "interrupted"
    assert (folder / "checkpoint-2/rl_state.json").is_file()
    assert "the run ends at step 2; the newest checkpoint is" in said
    for row, wanted in zip(read_metrics(folder), rows, strict=True):
        assert row.keys() == wanted.keys()
        for name in wanted.keys() & {"step", "loss", "entropy", "grad_norm", "eval_reward"}:
            assert row[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6)
    ids = torch.arange(6)[None]
    folders = tmp_path / "straight/merged", folder / "merged"
    merged = [AutoModelForCausalLM.from_pretrained(path) for path in folders]
    logits = [model(input_ids=ids).logits for model in merged]
    if (folder / "adapter_config.json").is_file():  # FSDP2 saves none by default
        logits.append(AutoPeftModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=1e-5)
    assert (make_tiny_model()(input_ids=ids).logits - logits[0]).abs().max() > 1e-4


FAILS = """
import sys
from pathlib import Path
from tests.helpers import StubSink, StubSource, load_example
from verifiers_rl import RLConfig, RLTrainer

folder, loss = sys.argv[1:]


class Fails(RLTrainer):
    def microbatch_loss(self, *args):
        own = super().microbatch_loss(*args)
        if self.args.process_index == 1:
            if loss == "raises":
                raise FloatingPointError("of rank 1 alone")
            own = own * float("nan")
        return own


args = RLConfig(
    output_dir=f"{folder}/run", use_cpu=True, use_lora=False, batch_size=16, max_steps=1,
    rollouts_per_example=4, max_seq_len=32, disable_tqdm=True, learning_rate=1e-3, ddp_timeout=60,
)
trainer = Fails(
    f"{folder}/base", None, args, load_example("warm_start").make_tokenizer(),
    orchestrator=StubSource(16), weight_sync=StubSink(),
)
rank = args.process_index
trainer.checkpoints.save_or_say = Path(folder, f"saved-{rank}").touch
try:
    trainer.train()
except FloatingPointError:
    Path(folder, f"failed-{rank}").touch()
    sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss, marks",
    [("raises", ["failed-1"]), ("is NaN", ["failed-0", "failed-1", "saved-0", "saved-1"])],
)
def test_what_one_rank_raises_alone_waits_for_no_other(tmp_path, loss, marks):
    """To save a checkpoint, all ranks must come, as they do where the loss of a batch is NaN."""
    write_model(tmp_path / "base")
    (script := tmp_path / "script.py").write_text(FAILS)
    run_python(*TWO_RANKS, script, tmp_path, loss, status=1, OMP_NUM_THREADS="1")
    assert sorted(path.name for path in tmp_path.glob("*ed-?")) == marks
