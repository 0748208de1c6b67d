"""Conversations as tokens, each equal one rendered once."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.helpers import make_tokenizer
from verifiers_rl.envs.rendering import Renderer


@pytest.fixture
def tokenizer():
    """One that counts how often it renders."""
    render = make_tokenizer().apply_chat_template
    return SimpleNamespace(apply_chat_template=Mock(wraps=render), render=render)


def test_equal_conversations_are_rendered_once_and_whatever_differs_anew(tokenizer):
    renderer, render = Renderer(tokenizer), tokenizer.apply_chat_template
    one, other = {"role": "user", "content": "hé"}, {"role": "system", "content": "hé"}
    requests = [
        ([one], True, {}), ([one], False, {}), ([one, one], True, {}), ([other], True, {}),
        ([one], True, {"tools": []}), ([one], True, {"tools": None}),
    ]  # fmt: skip
    for messages, is_prompt, template in requests * 2:
        found = renderer.render([dict(message) for message in messages], is_prompt, **template)
        assert found == tokenizer.render(
            messages, add_generation_prompt=is_prompt, return_dict=False, **template
        )
        found.append(0)  # nobody else sees what one does to the tokens
    assert render.call_count == len(requests)


# As those of Qwen3-Coder and GLM, it takes no arguments but an object.
OF_OBJECTS = """
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] -%}{%- for k, v in call.function.arguments|items -%}
{{ k }}={{ v }}{%- endfor -%}{%- endfor -%}{{ eos_token }}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


HUGE = '{"n": ' + 5000 * "9" + "}"  # which Python refuses to read


@pytest.mark.parametrize("arguments", ['{"x": 4}', "null", HUGE, 100_000 * "["])
def test_a_conversation_goes_on_after_a_tool_call_whose_arguments_are_no_object(arguments):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = OF_OBJECTS
    renderer, call = Renderer(tokenizer), {"name": "double", "arguments": arguments}
    question = {"role": "user", "content": "q"}
    reply = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]}
    result = {"role": "tool", "content": "error", "tool_call_id": "1"}
    so_far = [*renderer.render([question]), *tokenizer("zz").input_ids, tokenizer.eos_token_id]
    extended = renderer.extend(so_far, [question, reply, result], 1)
    after = tokenizer(f"<|tool|>error{tokenizer.eos_token}<|assistant|>").input_ids
    assert extended == so_far + after
    assert call["arguments"] == arguments
