"""Environments of other projects, through the tasksets of verifiers: a rollout of each, of which
each sampled token is trained. docs/environments_of_others.md says what cannot be tried here.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn
from verifiers.v1.tasksets import nemo_gym

from tests.conftest import free_port, wait_until
from tests.serving import uvicorn_in_thread
from tests.test_environments_v1 import load
from tests.test_environments_v1 import play as play
from tests.test_environments_v1 import tokenizer as tokenizer

# Warnings of theirs are not ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def rollout_of(play):
    """Plays one rollout of a taskset with these options, in which the model says these texts."""

    def rollout_of(taskset, options, *texts):
        said = iter(texts)
        env = load(taskset, harness=None, options=options)
        (rollout,), _ = play(lambda prompt: next(said), env)
        assert rollout.num_turns == len(texts) and len(rollout.samples) == 1
        return rollout

    return rollout_of


@pytest.fixture
def openenv():
    """The address of a server of OpenEnv."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config("tests.v1.openenv_hunt:app", port=port))
    with uvicorn_in_thread(server):
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{port}"


def is_newer(python):
    """Whether this Python runs, and NeMo Gym runs on it."""
    code = "import sys; sys.exit(sys.version_info < (3, 12))"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


@pytest.fixture
def counter(tmp_path):
    """The address of NeMo Gym's resource server whose sessions count, in a Python of its own."""
    known = filter(None, map(shutil.which, (sys.executable, "python3.13", "python3.12")))
    if (python := next(filter(is_newer, known), None)) is None:
        pytest.skip("NeMo Gym needs Python 3.12 or 3.13, and none is on PATH")
    uv, own = [sys.executable, "-m", "uv"], tmp_path / "nemo"
    subprocess.run([*uv, "venv", "--quiet", "--python", python, own], check=True)
    install = [*uv, "pip", "install", "--quiet", "--python", own, "nemo-gym>=0.4,<0.5"]
    subprocess.run(install, check=True, timeout=300)
    server = "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"
    script = Path(nemo_gym.__file__).with_name("server.py")  # as verifiers starts one
    env = os.environ | {"NEMO_GYM_RESOURCE_SERVER": server}
    process = subprocess.Popen([own / "bin/python", script], cwd=tmp_path, env=env)
    try:
        port = tmp_path / "nemo_gym.port"
        wait_until(lambda: port.exists() and port.read_text(), seconds=120)
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        process.terminate()
        process.wait(30)


def test_nemo_gyms_server_runs_the_tools_and_verifies_the_reply(rollout_of, counter, tmp_path):
    fields = {"increment_counter": {"count": {"type": "integer"}}, "get_counter_value": {}}
    tools = [
        {"type": "function", "name": name, "strict": True}
        | {"parameters": {"type": "object", "properties": fields[name], "required": []}}
        for name in fields
    ]
    asked = {"input": [{"role": "user", "content": "add 2, then count"}], "tools": tools}
    row = {"responses_create_params": asked, "initial_count": 3, "expected_count": 5}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    options = {"dataset": str(tmp_path / "rows.jsonl"), "task": {"resources_url": counter}}
    add = {"name": "increment_counter", "arguments": '{"count": 2}'}
    count = {"name": "get_counter_value", "arguments": "{}"}
    rollout = rollout_of("nemo_gym", options, add, count, "It is 5.")
    assert rollout.reward == 1.0 and '"count":5' in rollout.completion.replace(" ", "")


def test_openenvs_server_answers_each_action_and_rewards_of_steps_are_summed(rollout_of, openenv):
    options = {"base_url": openenv, "resets": [{"secret": 8}]}
    rollout = rollout_of("openenv", options, "4", '{"number": 9}', "8")
    assert rollout.reward == 1.0 - 0.25 - 0.25
    assert '"higher"' in rollout.completion and '"lower"' in rollout.completion


def test_textarenas_engine_answers_each_guess(rollout_of, tmp_path, monkeypatch):
    # In place of what nltk would download: words, and a tagger that takes them for nouns.
    tagger = "averaged_perceptron_tagger_eng"
    for path, text in {
        "corpora/words/en": "apple\nlemon",
        "corpora/words/en-basic": "apple",
        f"taggers/{tagger}/{tagger}.weights.json": "{}",
        f"taggers/{tagger}/{tagger}.tagdict.json": '{"apple": "NN", "test": "NN"}',
        f"taggers/{tagger}/{tagger}.classes.json": '["NN"]',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    monkeypatch.setattr("nltk.download", lambda *args, **options: True)
    rollout = rollout_of("textarena", {"game": "Wordle-v0"}, "[lemon]", "so [apple]")
    assert rollout.reward == 1.0 and "Y Y X X X" in rollout.completion
