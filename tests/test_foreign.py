"""Environments in rollout workers of another Python than the trainer's."""

import os
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, run_python
from verifiers_rl import RLConfig, WeightedEnv
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.cli.resolved import resolved_text
from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions
from verifiers_rl.envs.foreign import ForeignEnvironment
from verifiers_rl.envs.make import make_runner

# `make classic` makes it; `make test` does so by itself.
CLASSIC = ROOT / ".venv-classic/bin/python"
EXAMPLE = ROOT / "examples/classic"


def test_a_worker_loads_no_torch_and_no_vllm():
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, *args):\n"
        "        if name.partition('.')[0] in ('torch', 'vllm', 'peft', 'datasets'):\n"
        "            raise ImportError(f'{name} is not for a worker')\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "import verifiers_rl.envs.workers, verifiers_rl.envs.made_there, verifiers_rl.envs.v1\n"
        "import verifiers_rl.envs.chat_harness, verifiers_rl.envs.dataset\n"
        "assert 'transformers' not in sys.modules\n"
        "from verifiers_rl import env_from\n"
        "from verifiers_rl.envs.v1_loading import environment_of, load_v1_environment\n"
        "from verifiers_rl.envs.base import RunnerOptions\n"
        "from verifiers_rl.envs.v1 import V1Environment\n"
        "given = environment_of(env_from(['Say yes.'], lambda completion: 1.0))\n"
        "for env in (load_v1_environment({'id': 'small_tasks'}), given):\n"
        "    V1Environment(env, RunnerOptions('http://unused', None, 64))\n"
    )
    run_python("-c", code, PYTHONPATH=ROOT / "tests/v1")


def test_a_worker_has_this_package_and_nothing_else_of_this_python(tmp_path, tokenizer):
    (tmp_path / "curious.py").write_text(
        "import sys\n"
        "from importlib.util import find_spec\n"
        "def load_environment(**args):\n"
        "    import classic_reverse_text, verifiers_rl.types\n"
        "    found = [n for n in ('torch', 'vllm', 'tests', 'peft') if find_spec(n)]\n"
        f"    ours = [p for p in sys.path if p.startswith({sys.prefix + os.sep!r})]\n"
        "    assert not found and not ours, (found, ours)\n"
        "    return classic_reverse_text.load_environment(**args)\n"
    )
    table = {"id": "curious", "args": {"num_train": 8, "num_eval": 2}}
    options = RunnerOptions("http://unused", tokenizer, 64, max_prompt_len=200)
    env = ForeignEnvironment(table, str(CLASSIC), options, [tmp_path, EXAMPLE])
    assert (env.sizes("train"), env.sizes("eval")) == ([8], [2])


def test_classic_environments_in_their_own_python(tokenizer, tmp_path):
    """Runs the tests in tests/classic there."""
    tokenizer.save_pretrained(tmp_path)
    variables = {"TOKENIZER": tmp_path, "HF_HUB_OFFLINE": 1}  # for a model named "mine"
    words = ["-q", "-p", "no:cacheprovider", "--confcutdir", "tests/classic", "tests/classic"]
    run_python("-m", "pytest", *words, python=CLASSIC, **variables)


def test_a_python_that_cannot_run_workers_is_one_line_that_says_what_to_install(tmp_path):
    bare = tmp_path / "bare"
    run_python("-m", "venv", "--without-pip", bare)
    options = RunnerOptions("http://unused", None, 64)
    for python, expected in (
        (tmp_path / "none", r"no such program; make a Python .*: `uv venv NAME"),
        (bare / "bin/python", r"No module named 'verifiers'; make .* --python .*verifiers"),
    ):
        with pytest.raises(InvalidEnvironmentError, match=expected) as caught:
            ForeignEnvironment({"id": "e"}, str(python), options)
        assert f"python='{python}'" in str(caught.value) and "\n" not in str(caught.value)


def test_arguments_that_would_change_in_json_are_one_error():
    mixed = [WeightedEnv({"id": "e", "args": {"a": (1, 2)}}, "e", python=sys.executable)]
    args = RLConfig(use_cpu=True, env_workers=0)
    with pytest.raises(InvalidEnvironmentError, match=r"'a': \(1, 2\)\}\} would change in JSON"):
        make_runner(mixed, "http://unused", None, args)


def test_a_toml_names_the_python_relative_to_itself(tmp_path):
    (tmp_path / "venv").symlink_to(Path(sys.prefix))
    toml = tmp_path / "rl.toml"
    toml.write_text(
        'model = "m"\n[env]\nid = "classic"\npython = "venv/bin/python"\nargs = { size = 3 }\n'
        'client_type = "renderer"\n'
    )
    config = load_run_config(toml, checks_model=False)
    python = f"{tmp_path}/venv/bin/python"
    (env,) = config.load_envs()
    table = {"id": "classic", "args": {"size": 3}, "client_type": "renderer"}
    assert (env.env, env.name) == (table, "classic")
    assert (env.python, env.folders) == (python, [tmp_path])
    assert f'python = "{python}"' in resolved_text(config, f"{tmp_path}/out")
