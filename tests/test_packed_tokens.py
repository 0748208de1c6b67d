import asyncio
import base64
import json
import math
import struct
from types import SimpleNamespace

import pytest

from verifiers_rl.inference.generation import (
    Generation,
    TokenRequest,
    current_generation,
    reply_in_lines,
)
from verifiers_rl.inference.packed_tokens import (
    pack_ids,
    pack_sampled,
)


def base64_of(form, *numbers):
    return base64.b64encode(struct.pack(f"<{len(numbers)}{form}", *numbers)).decode()


def make_request(**fields):
    fields = {"tokens": pack_ids([1, 2]), **fields}
    return TokenRequest(fields, vocab_size=10, max_model_len=5)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tokens": None}, "must be token ids, base64 of int32"),
        ({"tokens": [3]}, "must be token ids, base64 of int32"),
        ({"tokens": ""}, "must be at least one token id"),
        ({"tokens": "AAA"}, "base64 of int32"),
        ({"tokens": "A A="}, "base64 of int32"),
        ({"tokens": "é==="}, "base64 of int32"),
        ({"tokens": "AAAA"}, "base64 of int32: buffer size"),
        ({"tokens": pack_ids([3, 10])}, "10 is no token id below 10"),
        ({"tokens": pack_ids([3, -1])}, "-1 is no token id below 10"),
        ({"tokens": pack_ids([3] * 5)}, "a prompt of 5 is longer than .* \\(--max-model-len 5"),
        ({"stream": True}, "only a whole reply of one completion"),
        ({"n": 2}, "one completion"),
        ({"use_beam_search": True}, "one completion"),
        *(({"seeds": wrong}, "seeds=.* or null, for each completion") for wrong in (3, [], [-1])),
        *(({"seeds": [4, wrong]}, "must be a list") for wrong in (2**63, True, 1.0, "1")),
        ({"seeds": [None], "stream": True}, "for several completions, set seeds"),
    ],
)
def test_what_cannot_be_served_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        make_request(**fields)


def answered(request, token_ids, logprobs=(), *spans):
    """Let a request end as vLLM would, with these tokens, which policies sampled from these on."""
    kept = SimpleNamespace(logprobs=logprobs, counts=[], allowed=[])
    versions = [SimpleNamespace(start=start, version=version) for start, version in spans]
    ended = SimpleNamespace(
        index=0, token_ids=token_ids, logprobs=kept, weight_versions=versions, finish_reason="stop"
    )
    request.end(ended)
    return request


class Chat:
    """Stands for vLLM's chat handler: its reply counts how often its parser has been used."""

    renderer = SimpleNamespace(tokenizer=None)

    def _make_parser(self, *_):
        return []

    def _effective_chat_template_kwargs(self, request):
        return {}

    async def chat_completion_full_generator(self, request, outputs, *, parser):
        (output,) = [output async for output in outputs]
        parser.append(output.outputs[0].index)
        text = json.dumps({"id": output.outputs[0].index, "parsed": len(parser)})
        return SimpleNamespace(model_dump_json=lambda: text)


def test_each_completion_of_a_group_is_a_line_as_soon_as_it_has_ended():
    """One that has failed has none. Other requests have their whole reply, as before."""
    chat, sent, parser = Chat(), [], []
    reply_in_lines(chat)
    generation = Generation(make_request(seeds=[5, 6, None]))

    async def outputs(*given):
        for number, reason in given:
            kept = SimpleNamespace(logprobs=[-math.inf], counts=[], allowed=[])
            versions = [SimpleNamespace(start=0, version="3")] if number == 2 else []
            ended = {"index": number, "token_ids": [7], "logprobs": kept, "finish_reason": reason}
            generation.end(ended := SimpleNamespace(**ended, weight_versions=versions))
            yield SimpleNamespace(outputs=[ended])
            assert len(sent) == {2: 1, 0: 1, 1: 2, 9: 2}[number]

    async def run(*given):
        return await chat.chat_completion_full_generator(None, outputs(*given), parser=parser)

    async def run_group():
        current_generation.set(generation)
        async for line in await run((2, "stop"), (0, "error"), (1, "length")):
            sent.append(line)

    asyncio.run(run_group())
    lines = [line.split(" ", 2) for line in sent]
    assert [line[:2] for line in lines] == [["2", "0:3"], ["1", ""]]
    replies = [{"packed_tokens": pack_sampled([7], [-9999]), "id": n, "parsed": 1} for n in (2, 1)]
    assert [json.loads(line[2]) for line in lines] == replies
    assert parser == [] and generation.packed == b""
    assert json.loads(asyncio.run(run((9, "stop"))).model_dump_json()) == {"id": 9, "parsed": 1}


@pytest.mark.parametrize(
    "token_ids, spans, versions",
    [
        ([7, 8, 9], [(0, "3"), (2, "4")], "0:3,2:4"),
        ([7], [(0, "3"), (1, "default")], None),  # before the first push
        ([7], [(0, "3"), (1, "none")], None),  # while a push mixes two
        ([], [], None),
    ],
)
def test_only_tokens_of_a_known_policy_have_versions(token_ids, spans, versions):
    assert answered(Generation(), token_ids, [], *spans).versions == versions


def test_the_tokens_take_the_place_of_the_messages_and_the_reply_fits_behind_them():
    for wanted, fitting in ((None, 3), (2, 2), (9, 3)):
        sampling = SimpleNamespace(max_tokens=wanted)
        prompt = {"type": "token", "prompt_token_ids": [9], "prompt": "text", "cache_salt": "s"}
        fitted = make_request().fit(prompt, sampling)
        assert fitted == {"type": "token", "prompt_token_ids": [1, 2], "cache_salt": "s"}
        assert vars(sampling) == {"max_tokens": fitting, "logprobs": 0, "flat_logprobs": True}
    with pytest.raises(ValueError, match="a prompt with images or audio"):
        make_request().fit({"type": "multimodal"}, sampling)
