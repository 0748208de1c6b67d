"""`vf-rl --eject`: the copies train as the originals do, and an edit in either has an effect."""

import importlib
import sys
from functools import partial

import pytest

from tests.helpers import StubSink, run_python
from verifiers_rl import RLTrainer
from verifiers_rl.cli import rl

NAMES = ("my_trainer", "my_orchestrator")


@pytest.fixture
def run_eject(run_main):
    """Runs `vf-rl --eject` into a folder, as `run_main` does."""
    return partial(run_main, rl.main, "--eject")


@pytest.fixture
def import_fork(tmp_path, monkeypatch):
    """Imports the trainer of the fork in tmp_path."""
    monkeypatch.syspath_prepend(tmp_path)

    def forget():
        for name in NAMES:
            sys.modules.pop(name, None)

    def load():
        forget()
        importlib.invalidate_caches()
        return importlib.import_module("my_trainer").RLTrainer

    yield load
    forget()


@pytest.fixture
def train(make_whole):
    """Trains three steps on stub rollouts with a trainer and its orchestrator, but no server.
    Returns what came of it.
    """

    def train(trainer_class):
        trainer = make_whole(
            trainer_class, parts={"weight_sync": StubSink()}, use_lora=False, batch_size=8,
            rollouts_per_example=4, micro_batch_size=8, max_seq_len=32, max_steps=3,
            learning_rate=1e-2, seed=3,
        )  # fmt: skip
        trainer.train()
        (num_updates,) = {int(state["step"]) for state in trainer.optimizer.state.values()}
        first, *_ = (row for row in trainer.state.log_history if "loss" in row)
        return first, (first["num_samples"], num_updates, trainer.weight_sync.pushed)

    return train


def change(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))


FORKS = {
    "half of the rollouts": ("in rollouts for sample in", "in rollouts[:4] for sample in"),
    "a term per token": (
        "        metrics.add(inputs, outputs.metrics, microbatch)\n",
        """\
        outputs.loss = outputs.loss + 0.5 * (inputs.weights * inputs.trainer_logprobs**2).sum()
        mine = inputs.trainer_logprobs.detach()
        metrics.add(inputs, {**outputs.metrics, "mine": mine}, microbatch)
""",
    ),
    "two losses": (
        "        outputs = self.loss_fn(inputs)\n",
        """\
        from verifiers_rl.losses import add_terms, reinforce

        outputs = add_terms(self.loss_fn, reinforce)(inputs)
""",
    ),
    "two updates a batch": (
        "        loss = self.train_on(model, batch, metrics)\n",
        """\
        first = np.arange(len(batch.sizes.lengths)) % 2 == 0
        loss = self.train_on(model, batch, metrics, first)
        self.update_now(model)
        loss += self.train_on(model, batch, metrics, ~first)
""",
    ),
    "an update every second batch": (
        "        loss = self.train_on(model, batch, metrics)\n",
        """\
        loss = self.train_on(model, batch, metrics)
        if self.state.global_step % 2 == 0:
            self.kept = [parameter.grad for parameter in model.parameters()]
            self.optimizer.zero_grad()
        else:
            for parameter, kept in zip(model.parameters(), self.kept, strict=True):
                parameter.grad += kept
""",
    ),
    "weights sent every second step": (
        "        version = self.state.global_step\n        if self.weight_sync.policy_version",
        """\
        version = self.state.global_step // 2 * 2
        if self.weight_sync.policy_version""",
    ),
}


# What they make of the numbers of samples and updates, and of the versions that are pushed.
PLAIN = (8, 3, [0, 1, 3])
MADE = {
    "half of the rollouts": (4, 3, [0, 1, 3]),
    "two updates a batch": (8, 6, [0, 1, 3]),
    "an update every second batch": (8, 1, [0, 1, 3]),
    "weights sent every second step": (8, 3, [0, 2]),
}


@pytest.mark.parametrize("name", FORKS)
def test_a_change_of_the_step_is_one_edit_of_one_copy(
    tmp_path, run_eject, import_fork, train, name
):
    status, said, _ = run_eject(tmp_path)
    assert status == 0 and 'class = "my_trainer:RLTrainer"' in said
    plain, made = train(RLTrainer)
    assert made == PLAIN
    changed = "orchestrator" if "rollouts" in name else "trainer"
    change(tmp_path / f"my_{changed}.py", *FORKS[name])
    fork = import_fork()
    assert fork.__module__ == "my_trainer" and not issubclass(fork, RLTrainer)
    forked, made = train(fork)
    assert made == MADE.get(name, PLAIN)
    assert (forked["loss"] == plain["loss"]) == ("every second" in name)
    assert ("mine" in forked) == (name == "a term per token")


def test_a_script_may_import_the_copy_first(tmp_path, run_eject, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_eject()[0] == 0  # into this folder
    code = "from my_trainer import RLTrainer; import transformers; transformers.Trainer"
    run_python("-c", code, folder=tmp_path)


def test_a_fork_that_is_there_already_is_not_overwritten(tmp_path, run_eject):
    (tmp_path / "my_orchestrator.py").write_text("mine")
    status, _, said = run_eject(tmp_path)
    assert status == 1 and "holds my_orchestrator.py already; choose another folder" in said
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
