"""Environments of other projects, through the tasksets of verifiers: a rollout of each, of which
each sampled token is trained. docs/environments_of_others.md says what cannot be tried here.
"""

import json
import subprocess
import sys
import time
import urllib.request

import pytest
from aiohttp import web

from tests.conftest import free_port
from tests.helpers import ROOT
from tests.serving import in_thread, serving
from tests.test_environments_v1 import load
from tests.test_environments_v1 import play as play
from tests.test_environments_v1 import tokenizer as tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # their own code


def last_turn(prompt):
    return prompt.rpartition("<|user|>")[2].partition("<|end|>")[0]


@pytest.fixture
def openenv():
    """The address of a server of OpenEnv, in a process of its own."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, ROOT / "tests/v1/openenv_hunt.py", str(port)])
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/schema", timeout=1)
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def test_an_environment_of_openenv_is_played_by_its_client(play, openenv):
    def halve(prompt):
        hints = [json.loads(part.partition("<|end|>")[0]) for part in prompt.split("<|user|>")[1:]]
        assert hints[0]["action_schema"]["required"] == ["number"]
        told = [hint["observation"]["text"] for hint in hints[1:]]
        low, high = 0, 15
        for hint in told:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if hint == "higher" else (low, middle - 1)
        return str((low + high) // 2)

    env = load("openenv", harness=None, options={"base_url": openenv, "resets": [{"secret": 9}]})
    (rollout,), _ = play(halve, env)
    assert rollout.num_turns == 3 and rollout.reward == 1.0 - 0.25 * 2
    assert len(rollout.samples) == 1


def test_a_game_of_textarena_is_played_by_its_engine(play, tmp_path, monkeypatch):
    # In place of what nltk would download: two words, and a tagger that takes all for nouns.
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
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *args, **options: True)
    env = load("textarena", harness=None, options={"game": "Wordle-v0"})
    guesses = iter(["[lemon]", "so [apple]"])
    (rollout,), _ = play(lambda prompt: next(guesses), env, max_seq_len=8000)
    assert (rollout.reward, rollout.num_turns) == (1.0, 2)
    assert "Y Y X X X" in rollout.completion


def test_a_resource_server_of_nemo_gym_scores_a_rollout(play, tmp_path):
    rows = tmp_path / "rows.jsonl"
    asked = {"input": [{"role": "user", "content": "2 + 2?"}]}
    rows.write_text(json.dumps({"responses_create_params": asked, "answer": "4"}))
    bodies = []

    async def answer(request):
        bodies.append(body := await request.json())
        if request.path == "/seed_session":
            return web.json_response({})
        said = body["response"]["output"][0]["content"][0]["text"]
        return web.json_response(
            body | {"reward": float(said == body["answer"]), "length": len(said)}
        )

    with in_thread(serving(answer, "/{path}")) as url:
        options = {"dataset": str(rows), "task": {"resources_url": url}}
        (rollout,), _ = play("4", load("nemo_gym", harness=None, options=options))
    assert rollout.reward == 1.0 and rollout.metrics["length"] == 1.0
    assert [body["answer"] for body in bodies] == ["4", "4"]
