"""`vf-rl replay`: what losses make of a step that a run has recorded."""

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import options_of_tiny_run
from tests.helpers import StubSink, make_tiny_model, on, values_in, write_model
from tests.reference import reference_policy
from tests.test_recording import GroupSource
from verifiers_rl import LossOutputs, RLConfig, RLTrainer, losses
from verifiers_rl.advantages import center_on_group_mean, of_rewards
from verifiers_rl.cli import rl
from verifiers_rl.cli.replay import main, shares_of, table_of
from verifiers_rl.replay import Outcome, replay
from verifiers_rl.report.run_folder import read_metrics, write_run

STEPS = 3


class Doubling(RLTrainer):
    """A fork."""

    def microbatch_loss(self, *args):
        return 2 * super().microbatch_loss(*args)


def twice(inputs):
    return LossOutputs(2 * losses.reinforce(inputs).loss)


def of_good(inputs):
    weights = inputs.weights * (inputs.advantages > 0)
    return LossOutputs(-(weights * inputs.advantages * inputs.trainer_logprobs).sum())


def opposite(group):
    assert [rollout.completion for rollout in group][-3:] == ["a1", "a2", "a3"]
    return [-advantage for advantage in of_rewards(center_on_group_mean)(group)]


def too_many(group):
    return [[1.0] * (sum(s.num_tokens for s in rollout.samples) + 1) for rollout in group]


def named(*functions):
    return [f"{__name__}:{function.__name__}" for function in functions]


def train(folder, **options):
    """The folder of a run, and the gradient of each step as the optimizer got it."""
    model = write_model(folder / "model")
    options |= {"max_grad_norm": 0.0, "save_steps": 1, "batch_size": 12, "micro_batch_size": 2}
    options |= {"rollouts_per_example": 4, "log_rollouts": 1.0, "max_steps": STEPS}
    args = RLConfig(**options_of_tiny_run(folder / "run", **options))
    trainer = RLTrainer(model, None, args, orchestrator=GroupSource(), weight_sync=StubSink())
    gradients = []

    def keep(state):
        grads = [p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad]
        gradients.append(torch.cat(grads))

    trainer.add_callback(on("on_pre_optimizer_step", keep))
    trainer.train()
    return folder / "run", gradients


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("full"), kl_beta=0.1, warmup_steps=2)


@pytest.fixture
def copied(run, tmp_path):
    """The folder of the run, to be changed."""
    return Path(shutil.copytree(run[0], tmp_path / "copied"))


def check_as_trained(folder, gradients):
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    logged = values_in(read_metrics(folder), "loss")
    for step in (1, STEPS):
        (outcome,) = replay(folder, step).values()
        torch.testing.assert_close(outcome.gradient, gradients[step - 1], rtol=1e-4, atol=1e-7)
        before, _ = outcome.metrics
        assert before["loss"] == pytest.approx(logged[step - 1], abs=1e-4)
        assert before["moved"] == pytest.approx(0, abs=1e-5)
    shutil.rmtree(folder / "replay")
    assert files == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_gradient_is_that_of_the_run(run):
    check_as_trained(*run)


def test_the_gradient_of_an_adapter_is_that_of_the_run(tmp_path):
    check_as_trained(
        *train(tmp_path, kl_target=1e-3, use_lora=True, lora_rank=2, lora_dropout=0.1, kl_beta=0.1)
    )


def test_the_step_of_the_optimizer_is_that_of_the_run(run):
    (outcome,) = replay(run[0], 2).values()
    model = AutoModelForCausalLM.from_pretrained(run[0] / "checkpoint-2").double()
    numbers = []
    for row in pq.read_table(run[0] / "rollouts").to_pylist():
        if row["step"] != 2 or not row["in_loss"]:
            continue
        policy = reference_policy(model, np.array(row["token_ids"]), 0.7)
        names = "token_ids", "trainer_logprobs", "inference_logprobs", "advantages"
        for t in np.nonzero(row["loss_mask"])[0]:
            token, recorded, sampled, advantage = (row[name][t] for name in names)
            logprob = policy[t - 1][token].item()
            ratio = np.exp(logprob - sampled)
            kl = ratio - 1 - np.log(ratio)
            numbers.append((abs(logprob - recorded), kl, ratio * advantage))
    expected = np.mean(numbers, 0)
    found = [outcome.metrics[1][name] for name in ("moved", "mismatch_kl", "gain")]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert expected[0] > 0.01


def test_gradients_shares_and_weights_of_losses_that_are_known(run):
    # In the first step the penalty on the KL has no gradient.
    of_twice, good = named(twice, of_good)
    outcomes = replay(run[0], 1, ["reinforce", of_twice, good])
    plain = outcomes["reinforce"].gradient
    assert torch.equal(outcomes[of_twice].gradient, 2 * plain) and plain.norm() > 0.1
    share, of_tokens = shares_of(outcomes[good].tokens)["sign of A = 1"]
    assert share == pytest.approx(1, abs=1e-6) and 0 < of_tokens < 1
    assert outcomes[good].metrics[0]["has_gradient"] == pytest.approx(of_tokens)
    # The file has each loss token, with its advantage as its weight under REINFORCE.
    written = pq.read_table(run[0] / "replay/step-000001.parquet").drop([good])
    rows = pq.read_table(run[0] / "rollouts", filters=[("step", "=", 1)]).to_pylist()
    assert sorted(zip(*written.to_pydict().values(), strict=True)) == [
        (n, t, row["trainer_logprobs"][t], advantage, 2 * advantage)
        for n, row in enumerate(row for row in rows if row["in_loss"])
        for t, advantage in enumerate(row["advantages"]) if row["loss_mask"][t]
    ]  # fmt: skip


def test_cosine_and_shares_of_a_case_made_by_hand():
    # Of two tokens: place, weight, logprob, advantage, behind what names them.
    kinds = torch.tensor([[0.2, 1.0], [3.0, -1.0], [-3.0, -0.01], [2.0, -2.0]])
    tokens = torch.cat([torch.zeros(3, 2), kinds])
    shares = shares_of(tokens)
    kinds = "place <= 0.25", "probability <= 0.1", "sign of A = 1"
    assert [shares[kind] for kind in kinds] == 3 * [(0.75, 0.5)]
    gradients = torch.tensor([[3.0, 4.0], [4.0, 3.0]])
    table = table_of({"ab"[n]: Outcome(gradients[n], [{}], tokens) for n in (0, 1)})
    assert "| norm of the gradient | 5 | 5 |\n| cosine with a | 1.000 | 0.960 |" in table


def test_advantages_are_computed_again_from_the_recorded_rewards(run):
    (recorded,) = replay(run[0], 1).values()
    mean, opposed = replay(run[0], 1, advantages=["mean", *named(opposite)]).values()
    assert torch.equal(mean.gradient, recorded.gradient)
    assert torch.equal(opposed.gradient, -mean.gradient)


def test_a_run_of_a_toml_is_replayed_by_its_own_trainer(run, copied, capsys):
    model = run[0].parent / "model"
    toml = f'model = "{model}"\n[env]\nid = "e"\n[trainer]\nclass = "{named(Doubling)[0]}"\n'
    (copied / "resolved.toml").write_text(toml)
    assert main([str(copied), "--step", "1", "--loss", "ppo", "--loss", "cispo"]) == 0
    (plain,) = replay(run[0], 1, ["ppo"]).values()
    out = capsys.readouterr().out
    assert f"| norm of the gradient | {2 * plain.gradient.norm():.3g} | " in out
    assert "| cosine with ppo | 1.000 | " in out
    assert "| masked_share/dppo |  | " in out  # of the default mask of cispo alone


def changed(folder, column, change):
    for path in (folder / "rollouts").iterdir():
        table = pq.read_table(path)
        place, own = table.column_names.index(column), table.schema.field(column)
        values = [change(value) for value in table[column].to_pylist()]
        pq.write_table(table.set_column(place, own, pa.array(values, own.type)), path)


def without_tokens(folder):
    changed(folder, "has_tokens", lambda _: False)


def with_shorter_advantages(folder):
    changed(folder, "advantages", lambda values: values and values[:-1])


def without_a_column(folder):
    for path in (folder / "rollouts").iterdir():
        pq.write_table(pq.read_table(path).drop(["has_tokens", "loss_mask"]), path)


def with_a_file_cut(folder):
    for path in (folder / "rollouts").iterdir():
        path.write_bytes(path.read_bytes()[:-9])


def with_a_pipe(folder):
    for path in (folder / "rollouts").iterdir():
        path.unlink()
        os.mkfifo(path)  # for which a reader would wait


def without_a_checkpoint(folder):
    shutil.rmtree(folder / "checkpoint-1")


def with_another_model(folder):
    other = write_model(folder / "other", make_tiny_model(seed=1))
    write_run(folder, {"model": other})


@pytest.mark.parametrize("change, words, said", [
    (None, "--step 9", "--step 9: no rollout in RUN/rollouts was in its loss; its last file"),
    (without_tokens, "--step 2", "lacks the tokens of some groups; a run with log_rollouts=1"),
    (without_a_checkpoint, "--step 2", "--step 2: it starts from RUN/checkpoint-1, and the run's"),
    (with_another_model, "--step 1", "--step 1: logprobs are"),
    (with_a_file_cut, "--step 2", "RUN/rollouts/step-000002.parquet cannot be read: "),
    (with_a_pipe, "--step 1", "--step 1: no rollout in RUN/rollouts was in its loss"),
    (without_a_column, "--step 1", "_tokens\" does not exist in schema'; bring it back as"),
    (with_shorter_advantages, "--step 1", "--step 1: Sample: all arrays must have one length >= 1"),
    (None, f"--step 1 --advantage {named(too_many)[0]}", "advantages for a rollout whose samples"),
])  # fmt: skip
def test_what_is_missing_is_said_in_one_line(copied, run_main, change, words, said):
    if change is not None:
        change(copied)
    status, _, error = run_main(rl.main, "replay", copied, *words.split())
    (line,) = [line for line in error.splitlines() if "error:" in line]
    assert status == 1 and said.replace("RUN", str(copied)) in line
