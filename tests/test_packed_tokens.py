import asyncio
import base64
import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from verifiers_rl.inference.packed_tokens import (
    pack_ids,
    pack_sampled,
    unpack_ids,
    unpack_sampled,
)
from verifiers_rl.inference.token_route import TokenRequest, current_request, take_over
from verifiers_rl.inference.vllm_versions import sampled_logprobs


def base64_of(form, *numbers):
    return base64.b64encode(struct.pack(f"<{len(numbers)}{form}", *numbers)).decode()


def make_request(**fields):
    return TokenRequest({"tokens": [1, 2], **fields}, vocab_size=10, max_model_len=5)


def test_ids_are_little_endian_int32_and_logprobs_float32():
    assert pack_ids([1, 2**31 - 1]) == base64_of("i", 1, 2**31 - 1) == "AQAAAP///38="
    packed = pack_sampled([3, 4], np.array([-0.5, -1.25], np.float64))
    assert packed == {"token_ids": base64_of("i", 3, 4), "logprobs": base64_of("f", -0.5, -1.25)}
    token_ids, logprobs = unpack_sampled(packed)
    assert (token_ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    assert (token_ids.tolist(), logprobs.tolist()) == ([3, 4], [-0.5, -1.25])
    assert unpack_ids(pack_ids([])).tolist() == []
    with pytest.raises(ValueError, match="2 tokens but 1 logprobs"):
        unpack_sampled(packed | {"logprobs": base64_of("f", -0.5)})


def test_a_prompt_is_a_list_or_packed():
    for tokens in ([4, 0, 9], pack_ids([4, 0, 9])):
        fields = {"tokens": tokens, "model": "m"}
        request = TokenRequest(fields, vocab_size=10, max_model_len=5)
        assert request.token_ids == [4, 0, 9] and not request.is_packed
        assert all(type(token) is int for token in request.token_ids)
        assert fields == {"model": "m"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": None}, "must be a list of token ids"),
        ({"tokens": []}, "must be a list of token ids"),
        ({"tokens": ""}, "must be a list of token ids"),
        ({"tokens": "AAA"}, "base64 of int32: Incorrect padding"),
        ({"tokens": "A A="}, "base64 of int32: "),
        ({"tokens": "é==="}, "base64 of int32: "),
        ({"tokens": "AAAA"}, "base64 of int32: buffer size must be a multiple of element size"),
        ({"tokens": pack_ids([3, 10])}, "10 is no token id below 10"),
        ({"tokens": pack_ids([3, -1])}, "-1 is no token id below 10"),
        ({"tokens": [3, 10]}, "10 is no token id below 10"),
        ({"tokens": [True]}, "True is no token id"),
        ({"tokens": ["3"]}, "'3' is no token id"),
        ({"tokens": pack_ids([3] * 5)}, "a prompt of 5 is longer than .* \\(--max-model-len 5"),
        ({"packed_tokens": "yes"}, "packed_tokens='yes': must be true or false"),
        ({"packed_tokens": True, "stream": True}, "a streamed reply"),
        ({"packed_tokens": True, "n": 2}, "one completion"),
        ({"packed_tokens": True, "use_beam_search": True}, "one completion"),
    ],
)
def test_what_cannot_be_served_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        make_request(**fields)


def reply_of(request, body=b'{"id":"1"}', status=200):
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    start = {"type": "http.response.start", "status": status, "headers": headers}
    rest = {"type": "http.response.body", "body": body}
    start, rest = request.splice(start), request.splice(rest)
    assert int(dict(start["headers"])[b"content-length"]) == len(rest["body"])
    return json.loads(rest["body"])


def test_sampled_tokens_are_spliced_into_the_reply_and_into_no_error():
    request = make_request(packed_tokens=True)
    request.take_sampled([7, 8], np.array([-0.5, -np.inf]))
    assert reply_of(request) == {"id": "1", "packed_tokens": pack_sampled([7, 8], [-0.5, -9999.0])}
    request = make_request(packed_tokens=True)
    request.take_sampled([7], np.array([-0.5]))
    assert reply_of(request, b'{"error":"x"}', status=500) == {"error": "x"}
    assert reply_of(make_request()) == {"id": "1"}


def test_a_packed_request_asks_vllm_for_nothing_else_a_token():
    fields = {"tokens": [1], "packed_tokens": True, "top_logprobs": 5, "return_token_ids": True}
    TokenRequest(fields, vocab_size=10, max_model_len=5)
    assert fields == {"logprobs": True, "top_logprobs": 0, "return_token_ids": False}
    fields = {"tokens": [1], "top_logprobs": 5, "return_token_ids": True}
    TokenRequest(fields, vocab_size=10, max_model_len=5)
    assert fields == {"top_logprobs": 5, "return_token_ids": True}


def test_logprobs_are_those_of_the_sampled_tokens():
    # The sampled token comes first, then the most likely ones.
    kept = SimpleNamespace(logprobs=[-0.5, -0.25, -2.0], start_indices=[0, 2])
    found = sampled_logprobs(kept)
    assert found.tolist() == [-0.5, -2.0] and found.dtype == np.float32
    assert sampled_logprobs(SimpleNamespace(logprobs=[], start_indices=[])).tolist() == []


def test_other_requests_to_the_chat_handler_stay_as_they_are():
    async def render_chat_request(request):
        return "conversation", [{"type": "token", "prompt_token_ids": [9], "prompt": "text"}]

    states = {}
    chat = SimpleNamespace(
        render_chat_request=render_chat_request,
        _create_chat_logprobs=lambda token_ids, top_logprobs: [
            *zip(token_ids, top_logprobs, strict=True)
        ],
    )
    processor = SimpleNamespace(
        add_request=lambda added: states.update({added.request_id: "as it is"}),
        request_states=states,
    )
    take_over(chat, SimpleNamespace(output_processor=processor))
    asked = SimpleNamespace(truncate_prompt_tokens=None)

    async def serve(request):
        current_request.set(request)
        processor.add_request(SimpleNamespace(request_id=str(len(states))))
        logprobs = chat._create_chat_logprobs(token_ids=[7], top_logprobs=[{7: "x"}])
        return await chat.render_chat_request(asked), logprobs

    for request, prompt in ((None, [9]), (make_request(), [1, 2])):
        (_, (rendered,)), logprobs = asyncio.run(serve(request))
        assert rendered["prompt_token_ids"] == prompt and logprobs == [(7, {7: "x"})]
        assert ("prompt" in rendered) == (request is None)
    assert set(states.values()) == {"as it is"} and len(states) == 2
