"""The teachers of a TOML: from its tables to the `Teacher`s of a run, and the servers between."""

import json

import pytest

from verifiers_rl.cli.config import TomlError
from verifiers_rl.cli.plan import SERVERS_VARIABLE
from verifiers_rl.inference.client import TOKEN_VARIABLE

ENVS = """
[[env]]
id = "letters"
[[env]]
id = "words"
algorithm = "opd"
teacher = "big"
distill_coef = 0.5
[[env]]
name = "sums"
algorithm = "opsd"
teacher = "old"
hint = "It is {answer}."
[env.taskset]
id = "sums"
"""
TEACHERS = """
[[teacher]]
name = "big"
model = "org/big"
base_url = "http://10.0.0.2:8000/v1"
key_variable = "BIG_KEY"
max_concurrent = 8
[[teacher]]
name = "old"
model = "./old"
gpus = 2
[teacher.args]
max_num_seqs = 16
"""
OURS = 'model = "org/small"\n[trainer.args]\nmax_steps = 3\n'
FLAT = 'model = "org/small"\nmax_steps = 3\n'


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def no_environments(monkeypatch):
    monkeypatch.delenv(SERVERS_VARIABLE, raising=False)
    monkeypatch.setattr(
        "verifiers_rl.cli.config.EnvTable.load", lambda self, *folders: f"env {self.id}"
    )


@pytest.mark.parametrize("head", [OURS, FLAT], ids=["ours", "flat"])
def test_environments_of_a_toml_learn_from_its_teachers(
    compose, tmp_path, monkeypatch, no_environments, head
):
    config = compose(head + ENVS + TEACHERS, words="--trainer.args.vllm_server_timeout 77")
    monkeypatch.setenv(SERVERS_VARIABLE, json.dumps({"teacher-old": "127.0.0.1:4321"}))
    monkeypatch.setenv(TOKEN_VARIABLE, "of the run")
    monkeypatch.setenv("BIG_KEY", "of the user")
    letters, words, sums = config.load_envs()
    assert (letters.env, letters.scorer) == ("env letters", None)
    words, sums = words.scorer, sums.scorer
    assert (words.algorithm, words.distill_coef, words.hint) == ("opd", 0.5, "")
    assert (sums.algorithm, sums.distill_coef, sums.hint) == ("opsd", 1.0, "It is {answer}.")
    big, old = words.teacher, sums.teacher
    assert (big.model, big.base_url) == ("org/big", "http://10.0.0.2:8000")
    assert (big.headers(), big.timeout_s, big.max_concurrent) == (bearer("of the user"), 300.0, 8)
    assert (old.model, old.base_url) == (f"{tmp_path}/0/old", "http://127.0.0.1:4321")
    # Its server may take as long as the others to load.
    assert (old.headers(), old.timeout_s, old.max_concurrent) == (bearer("of the run"), 77, 64)
    assert config.teachers[1].args == {"max_num_seqs": 16}


def test_where_nothing_learns_no_teacher_is_needed(compose, no_environments):
    envs = compose(OURS + ENVS + TEACHERS).load_envs(with_teachers=False)
    assert [env.name for env in envs] == ["letters", "words", "sums"]
    assert not any(env.scorer for env in envs)


def test_a_teacher_that_only_vf_rl_starts_is_one_line_elsewhere(compose, no_environments):
    config = compose(OURS + ENVS + TEACHERS)
    with pytest.raises(TomlError, match=r"config\.toml: \[teacher\.1\] base_url is missing"):
        config.load_envs()
