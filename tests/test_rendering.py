"""Conversations as tokens, each equal one rendered once."""

import pytest

from tests.helpers import load_example
from verifiers_rl.envs.rendering import NUM_KEPT, Renderer


class Counting:
    """A tokenizer that counts how often it renders."""

    def __init__(self):
        self.tokenizer = load_example("warm_start").make_tokenizer()
        self.num_renderings = 0

    def apply_chat_template(self, *args, **kwargs):
        self.num_renderings += 1
        return self.tokenizer.apply_chat_template(*args, **kwargs)


@pytest.fixture
def tokenizer():
    return Counting()


def test_equal_conversations_are_rendered_once(tokenizer):
    renderer = Renderer(tokenizer)
    messages = [{"role": "user", "content": "hé"}]
    expected = tokenizer.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    for _ in range(3):
        found = renderer.render([dict(message) for message in messages])
        assert found == expected
        found.append(0)  # nobody else sees what one does to the tokens
    assert tokenizer.num_renderings == 1


def test_whatever_differs_is_rendered_anew(tokenizer):
    renderer = Renderer(tokenizer)
    one, other = {"role": "user", "content": "1"}, {"role": "system", "content": "1"}
    requests = [
        ([one], True, {}), ([one], False, {}), ([one, one], True, {}), ([other], True, {}),
        ([one], True, {"tools": []}), ([one], True, {"tools": None}), ([one], True, {"x": 1}),
    ]  # fmt: skip
    for _ in range(2):
        for messages, is_prompt, template in requests:
            renderer.render(messages, is_prompt, **template)
    assert tokenizer.num_renderings == len(requests)


def test_few_renderings_are_kept(tokenizer):
    renderer = Renderer(tokenizer)
    for number in range(NUM_KEPT + 1):
        renderer.render([{"role": "user", "content": str(number)}])
    renderer.render([{"role": "user", "content": str(NUM_KEPT)}])
    assert tokenizer.num_renderings == NUM_KEPT + 1
    renderer.render([{"role": "user", "content": "0"}])
    assert tokenizer.num_renderings == NUM_KEPT + 2


def test_no_messages_are_no_tokens(tokenizer):
    assert Renderer(tokenizer).render([]) == []
