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


# As those of Qwen3-Coder and GLM, it takes no arguments but an object.
OF_OBJECTS = """
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] -%}{%- for k, v in call.function.arguments|items -%}
{{ k }}={{ v }}{%- endfor -%}{%- endfor -%}{{ eos_token }}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


@pytest.mark.parametrize("arguments", ['{"x": 4}', '{"x": 4', "[4]", "null", ""])
def test_a_conversation_goes_on_after_a_tool_call_whose_arguments_are_no_object(arguments):
    tokenizer = load_example("warm_start").make_tokenizer()
    tokenizer.chat_template = OF_OBJECTS
    renderer, call = Renderer(tokenizer), {"name": "double", "arguments": arguments}
    question = {"role": "user", "content": "q"}
    reply = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]}
    result = {"role": "tool", "content": "error", "tool_call_id": "1"}
    sampled = [*tokenizer("zz").input_ids, tokenizer.eos_token_id]
    so_far = renderer.render([question]) + sampled
    extended = renderer.extend(so_far, [question, reply, result], 1)
    after = renderer.render([question, result])[len(renderer.render([question], is_prompt=False)) :]
    assert extended == so_far + after
    assert call["arguments"] == arguments
