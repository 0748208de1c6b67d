"""Environments of other projects, through the tasksets of verifiers: a rollout of each, of which
each sampled token is trained. docs/environments_of_others.md says what cannot be tried here.
"""

import pytest
import uvicorn

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
