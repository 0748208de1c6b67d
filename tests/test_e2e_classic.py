"""A classic environment trains in a Python of its own, with one server for others beside it."""

import pytest

from tests.conftest import running_server
from tests.helpers import ROOT
from tests.test_e2e_train import history, options_of
from verifiers_rl import RLConfig, RLTrainer, WeightedEnv
from verifiers_rl.envs.v1_loading import load_v1_environment

pytestmark = pytest.mark.e2e

CLASSIC = str(ROOT / ".venv-classic" / "bin" / "python")


def test_a_classic_environment_trains_beside_one_of_v1(warm_start, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "reverse_text"))
    args = {"num_train": 2048, "num_eval": 64, "instruction": ""}
    classic = {"id": "classic_reverse_text", "args": args}
    taskset = {"id": "reverse_text", "num_tasks": 2048, "instruction": ""}
    folders = [ROOT / "examples" / "classic"]
    old = WeightedEnv(classic, "old", python=CLASSIC, folders=folders)
    new = WeightedEnv(load_v1_environment({"taskset": taskset}), "new")
    flags = ("--enable-lora", "--max-lora-rank", "16", "--no-enable-prefix-caching")
    with running_server(warm_start, tmp_path / "server.log", *flags) as server:
        options = {"max_off_policy_steps": 0, "max_steps": 2, "eval_examples": 64}
        args = RLConfig(**options_of(server, tmp_path, **options))
        trainer = RLTrainer(str(warm_start), [old, new], args)
        trainer.evaluate()
        trainer.train()
        assert history(trainer, "error_share") == [0.0] * 2
        kls = history(trainer, "mismatch_kl")
        assert kls[0] < 1e-6 and max(kls) < 1e-5
        assert {rollout.env for rollout in trainer.batch.rollouts} == {"old", "new"}
