"""Conversations as tokens, each equal one rendered once."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.helpers import load_example
from verifiers_rl.envs.rendering import NUM_KEPT, Renderer


@pytest.fixture
def tokenizer():
    """One that counts how often it renders."""
    render = load_example("warm_start").make_tokenizer().apply_chat_template
    return SimpleNamespace(apply_chat_template=Mock(wraps=render))


def test_equal_conversations_are_rendered_once_and_whatever_differs_anew(tokenizer):
    renderer, render = Renderer(tokenizer), tokenizer.apply_chat_template
    one, other = {"role": "user", "content": "hé"}, {"role": "system", "content": "hé"}
    expected = render([one], add_generation_prompt=True, return_dict=False)
    render.reset_mock()
    requests = [
        ([one], True, {}), ([one], False, {}), ([one, one], True, {}), ([other], True, {}),
        ([one], True, {"tools": []}), ([one], True, {"tools": None}), ([one], True, {"x": 1}),
    ]  # fmt: skip
    for _ in range(3):
        for messages, is_prompt, template in requests:
            found = renderer.render([dict(message) for message in messages], is_prompt, **template)
            assert (messages, is_prompt, template) != requests[0] or found == expected
            found.append(0)  # nobody else sees what one does to the tokens
    assert render.call_count == len(requests)
    assert renderer.render([]) == []


def test_few_renderings_are_kept(tokenizer):
    renderer = Renderer(tokenizer)
    for number in (*range(NUM_KEPT + 1), NUM_KEPT, 0):  # the last but one is still there
        renderer.render([{"role": "user", "content": str(number)}])
    assert tokenizer.apply_chat_template.call_count == NUM_KEPT + 2
