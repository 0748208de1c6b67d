"""The parts of vf-vllm that need no vLLM."""

import asyncio
import json

import pytest

from verifiers_rl.inference.server import (
    BadRequest,
    InFlight,
    format_spans,
    require,
    with_cache_salt,
)


def test_a_swap_splits_the_tokens_of_each_request_in_flight():
    in_flight = InFlight()
    in_flight.spans = {"a": [(0, 3)], "b": [(0, 3)], "queued": [(0, 3)]}
    in_flight.swap({"a": 17, "b": 1}, policy_version=4)
    in_flight.swap({"a": 17, "b": 5}, policy_version=5)  # "a" has sampled nothing in between
    assert format_spans(in_flight.spans["a"]) == "0:3,17:5"
    assert format_spans(in_flight.spans["b"]) == "0:3,1:4,5:5"
    assert format_spans(in_flight.spans["queued"]) == "0:5"


def salted(body, chunks=1):
    """What vLLM reads after `with_cache_salt`, and the length it is told."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = -(-len(data) // chunks)
    parts = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]
    messages.append({"type": "http.disconnect"})
    headers = {b"content-length": str(len(data)).encode()}

    async def receive():
        return messages.pop(0)

    async def run():
        replay = await with_cache_salt(receive, headers, "policy-4")
        return await replay(), await replay()

    first, second = asyncio.run(run())
    assert second == {"type": "http.disconnect"}
    assert not first["more_body"] and int(headers[b"content-length"]) == len(first["body"])
    return first["body"]


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_request_gets_the_cache_salt_of_its_policy(chunks):
    assert json.loads(salted({"prompt": "a"}, chunks)) == {"prompt": "a", "cache_salt": "policy-4"}


def test_a_cache_salt_of_the_client_stays_and_what_is_no_object_is_passed_on():
    assert json.loads(salted({"cache_salt": "mine"})) == {"cache_salt": "mine"}
    assert salted(b"[1]") == b"[1]" and salted(b"{") == b"{"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "port=None: must be of type int"),
        ({"port": "80", "timeout_s": 1}, "port='80': must be of type int"),
        ({"port": True, "timeout_s": 1}, "port=True"),
        ({"port": 80, "timeout_s": "1"}, "timeout_s='1': must be of type float"),
        ([], "port=None"),
    ],
)
def test_a_body_without_what_is_needed_is_refused(body, message):
    with pytest.raises(BadRequest, match=message):
        require(body, port=int, timeout_s=float)


def test_whole_seconds_are_seconds():
    require({"port": 80, "timeout_s": 1}, port=int, timeout_s=float)
