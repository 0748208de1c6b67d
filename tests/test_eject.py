"""`vf-rl --eject`: the copies train as the originals do, and an edit in either has an effect."""

import importlib
import sys
from pathlib import Path

import pytest

import verifiers_rl
from tests.helpers import StubSink, run_python
from verifiers_rl import RLTrainer
from verifiers_rl.cli import rl

PACKAGE = Path(verifiers_rl.__file__).parent
NAMES = {"my_trainer.py": "trainer.py", "my_orchestrator.py": "orchestrator.py"}


@pytest.fixture
def run_eject(run_main):
    """Runs vf-rl --eject into a folder. Returns its exit status and what it printed."""

    def run(*folder):
        status, *said = run_main(rl.main, "--eject", *folder)
        return status, "".join(said)

    return run


@pytest.fixture
def import_fork(tmp_path, monkeypatch):
    """Imports the trainer of the fork in tmp_path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget():
        for name in NAMES:
            sys.modules.pop(name.removesuffix(".py"), None)

    def load():
        forget()
        importlib.invalidate_caches()
        return importlib.import_module("my_trainer").RLTrainer

    yield load
    forget()


@pytest.fixture
def train(make_whole):
    """Trains three steps on stub rollouts with a trainer and its orchestrator, but no server.
    Returns the logged steps.
    """

    def train(trainer_class):
        trainer = make_whole(
            trainer_class, parts={"weight_sync": StubSink()}, use_lora=False, batch_size=8,
            rollouts_per_example=4, micro_batch_size=8, max_seq_len=32, max_steps=3,
            learning_rate=1e-2, seed=3,
        )  # fmt: skip
        trainer.train()
        (number,) = {int(state["step"]) for state in trainer.optimizer.state.values()}
        more = {"num_updates": number, "pushed": trainer.weight_sync.pushed}
        return [row | more for row in trainer.state.log_history if "loss" in row]

    return train


def change(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))


FORKS = {
    "half of the rollouts": ("in rollouts for sample in", "in rollouts[:4] for sample in"),
    "a term per token": (
        "        means.add(inputs, outputs.metrics, microbatch)\n",
        """\
        outputs.loss = outputs.loss + 0.5 * (inputs.weights * inputs.trainer_logprobs**2).sum()
        means.add(inputs, {**outputs.metrics, "mine": inputs.trainer_logprobs.detach()}, microbatch)
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
        "        loss = self.train_on(model, batch, means)\n",
        """\
        first = np.arange(len(batch.sizes.lengths)) % 2 == 0
        loss = self.train_on(model, batch, means, first)
        self.update_now(model)
        loss += self.train_on(model, batch, means, ~first)
""",
    ),
    "an update every second batch": (
        "        loss = self.train_on(model, batch, means)\n",
        """\
        loss = self.train_on(model, batch, means)
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


@pytest.mark.parametrize("name", FORKS)
def test_a_change_of_the_step_is_one_edit_of_one_copy(
    tmp_path, run_eject, import_fork, train, name
):
    status, said = run_eject(tmp_path)
    assert status == 0 and 'class = "my_trainer:RLTrainer"' in said
    plain = train(RLTrainer)
    of_orchestrator = "rollouts" in name
    change(tmp_path / f"my_{'orchestrator' if of_orchestrator else 'trainer'}.py", *FORKS[name])
    fork = import_fork()
    assert fork.__module__ == "my_trainer" and not issubclass(fork, RLTrainer)
    forked = train(fork)
    for row, of_plain in zip(forked, plain, strict=True):
        assert of_plain["num_samples"] == 8
        assert row["num_samples"] == (4 if of_orchestrator else 8)
        assert of_orchestrator or row["num_tokens"] == of_plain["num_tokens"]
    num_updates = {"two updates a batch": 6, "an update every second batch": 1}.get(name, 3)
    pushed = [0, 2] if "weights" in name else [0, 1, 3]
    assert (forked[0]["num_updates"], forked[0]["pushed"]) == (num_updates, pushed)
    assert (plain[0]["num_updates"], plain[0]["pushed"]) == (3, [0, 1, 3])
    assert (forked[0]["loss"] == plain[0]["loss"]) == ("every second" in name)
    assert ("mine" in forked[0]) == (name == "a term per token")


def test_the_copies_are_the_originals_but_for_one_import(tmp_path, run_eject, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_eject()[0] == 0  # into this folder
    for name, original in NAMES.items():
        head, *lines = (tmp_path / name).read_text().splitlines()
        assert f"{verifiers_rl.__version__}, {original}" in head
        expected = (PACKAGE / original).read_text().splitlines()
        lines.remove("import verifiers_rl  # before transformers")
        changed = [pair for pair in zip(expected, lines, strict=True) if pair[0] != pair[1]]
        own = ("from verifiers_rl.orchestrator import Orchestrator",
               "from my_orchestrator import Orchestrator")  # fmt: skip
        assert changed == ([own] if name == "my_trainer.py" else [])


def test_a_script_may_import_the_copy_first(tmp_path, run_eject):
    assert run_eject(tmp_path)[0] == 0
    code = "from my_trainer import RLTrainer; import transformers; transformers.Trainer"
    run_python("-c", code, folder=tmp_path)


def test_a_fork_that_is_there_already_is_not_overwritten(tmp_path, run_eject):
    (tmp_path / "my_orchestrator.py").write_text("mine")
    status, said = run_eject(tmp_path)
    assert status == 1
    assert f"{tmp_path} holds my_orchestrator.py already; choose another folder" in said
    assert (tmp_path / "my_orchestrator.py").read_text() == "mine"
    assert not (tmp_path / "my_trainer.py").exists()
