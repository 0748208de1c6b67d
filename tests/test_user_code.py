"""Functions and classes that an option or a TOML names as "module:name"."""

import pytest

from verifiers_rl import LossOutputs, RLConfig
from verifiers_rl.cli.plan import plan_servers
from verifiers_rl.types import Rollout

CODE = """
import dataclasses
from verifiers_rl import LossOutputs, RLConfig, RLTrainer

def loss(inputs, scale=1.0):
    return LossOutputs(scale * inputs)

def mask(inputs, least=1.0):
    return inputs > least

def advantage(group):
    return [rollout.reward * 2 for rollout in group]

@dataclasses.dataclass
class Config(RLConfig):
    max_seq_len: int = 96

class MyTrainer(RLTrainer):
    config_class = Config
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A module of a user's can be imported."""
    (tmp_path / "code_of_user.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_loss_and_an_advantage_are_found_by_their_names(code):
    args = RLConfig(
        use_cpu=True,
        loss="code_of_user:loss",
        loss_args={"scale": 2.5},
        advantage="code_of_user:advantage",
        gradient_masks={"code_of_user:mask": {"least": 3}},
    )
    (mask,) = args.make_masks().values()
    assert mask(4.0) and not mask(2.0)
    assert args.make_loss()(4.0) == LossOutputs(10.0)
    assert args.make_advantage()([Rollout(0, "", reward=1.5)]) == [3.0]


HEAD = 'model = "m/m"\n[env]\nid = "e"\n[trainer]\n'


def test_a_toml_names_the_class_of_its_trainer(code, compose):
    run = compose(HEAD + 'class = "code_of_user:MyTrainer"\n[trainer.args]\nbatch_size = 32')
    assert run.trainer_class().__name__ == "MyTrainer"
    assert run.config_class().__name__ == "Config"
    assert (run.option("batch_size"), run.option("max_seq_len")) == (32, 96)
    assert "--max-model-len 96 " in " ".join(plan_servers(run)[0].command("h", 7))
    assert compose(f"{HEAD}gpus = 1").config_class() is RLConfig
