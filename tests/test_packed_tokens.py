import asyncio
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from verifiers_rl.inference.generation import (
    TokenRequest,
    current_request,
    reply_in_lines,
)
from verifiers_rl.inference.packed_tokens import pack_numbers, pack_sampled


def make_request(**fields):
    fields = {"tokens": pack_numbers([1, 2]), "seeds": [None]} | fields
    return TokenRequest(fields, vocab_size=10, max_model_len=5)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tokens": [3]}, r"tokens\n.*valid string"),
        ({"tokens": ""}, "must be at least one token id"),
        ({"tokens": "A A="}, "base64 of int32"),
        ({"tokens": "AAAA"}, "base64 of int32: buffer size"),
        ({"tokens": pack_numbers([3, 10])}, "10 is no token id below 10"),
        ({"tokens": pack_numbers([3, -1])}, "-1 is no token id below 10"),
        ({"tokens": pack_numbers([3] * 5)}, "a prompt of 5 is longer than .*--max-model-len 5"),
        ({"stream": True}, r"stream\n.*False"),
        ({"n": 2}, r"n\n.*1"),
        ({"use_beam_search": True}, r"use_beam_search\n.*False"),
        *(({"seeds": wrong}, r"\nseeds.*\n") for wrong in (3, [], [-1], [4, 2**63], [True])),
    ],
)
def test_what_cannot_be_served_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        make_request(**fields)
    with pytest.raises(ValueError, match="valid dictionary"):
        TokenRequest([fields], vocab_size=10, max_model_len=5)


def ended(*spans, index=0, finish_reason="stop"):
    """What vLLM says of a completion, which policies sampled from these tokens on."""
    kept = [(np.array([[7]]), np.array([[-math.inf]]), np.array([1]), None)]
    versions = [SimpleNamespace(start=start, version=version) for start, version in spans]
    return SimpleNamespace(
        index=index, token_ids=[7], logprobs=kept, weight_versions=versions,
        finish_reason=finish_reason,
    )  # fmt: skip


class Chat:
    """Stands for vLLM's chat handler."""

    async def chat_completion_full_generator(self, request, outputs, *, parser):
        (output,) = [output async for output in outputs]
        text = json.dumps({"id": output.outputs[0].index})
        return SimpleNamespace(model_dump_json=lambda: text)


def replies_to(outputs, lines):
    """Add what the token route replies to these outputs of vLLM, a line at a time."""
    reply_in_lines(chat := Chat())

    async def run():
        current_request.set(make_request(seeds=[5, 6, None]))
        async for line in await chat.chat_completion_full_generator(None, outputs):
            lines.append(line.split(" ", 2))

    asyncio.run(run())


def test_each_completion_is_a_line_as_soon_as_it_has_ended():
    """One that has failed has none."""
    lines = []

    async def outputs():
        for index, reason, num_lines in ((2, "stop", 0), (0, "error", 1), (1, "length", 1)):
            completion = ended((0, "3"), index=index, finish_reason=reason)
            if reason == "error":  # before its first token
                completion.token_ids, completion.logprobs = [], []
            assert len(lines) == num_lines
            yield SimpleNamespace(outputs=[completion])

    replies_to(outputs(), lines)
    assert [line[:2] for line in lines] == [["2", "0:3"], ["1", "0:3"]]
    packed = pack_sampled([7], [-9999])
    replies = [{"packed_tokens": packed, "id": index} for index in (2, 1)]
    assert [json.loads(reply) for _, _, reply in lines] == replies


@pytest.mark.parametrize("reasons", [(), ("error", "abort")])
def test_a_request_without_any_line_is_an_error(reasons):
    async def outputs():
        for reason in reasons:
            yield SimpleNamespace(outputs=[ended((0, "3"), finish_reason=reason)])

    with pytest.raises(RuntimeError, match="ended every completion before its end"):
        replies_to(outputs(), [])


@pytest.mark.parametrize(
    "spans, versions",
    [
        ([(0, "3"), (2, "4")], "0:3,2:4"),
        ([(0, "3"), (1, "none")], ""),  # while a push mixes two
        ([], ""),
    ],
)
def test_only_tokens_of_a_known_policy_have_versions(spans, versions):
    assert make_request().line_of(ended(*spans), "{}").split(" ")[1] == versions


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own, while it is imported
def test_logprobs_come_with_the_last_token_of_a_whole_reply():
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    from verifiers_rl.inference.scheduler import keep_logprobs

    steps = [
        LogprobsLists(np.full((1, k), t), np.full((1, k), -t / 2), np.array([t]))
        for t, k in ((1, 2), (2, 3), (3, 2))  # in the second one, another request wanted more
    ]

    def told(ends, new, **options):
        options = {"output_kind": RequestOutputKind.FINAL_ONLY, "logprobs": 1, **options}
        request = SimpleNamespace(sampling_params=SamplingParams(**options))
        found = []
        for at, logprobs in enumerate(new):
            reason = FinishReason.LENGTH if ends and at == len(new) - 1 else None
            output = EngineCoreOutput("r", [at], new_logprobs=logprobs, finish_reason=reason)
            keep_logprobs(request, output)
            found.append(output.new_logprobs)
        return found

    for new in (steps, [*steps, None]):  # also where the last step has no token
        *before, whole = told(True, new)
        assert before == [None] * (len(new) - 1)
        assert whole.logprob_token_ids.tolist() == [[1, 1], [2, 2], [3, 3]]
        assert whole.logprobs.tolist() == [[-0.5, -0.5], [-1, -1], [-1.5, -1.5]]
        assert whole.sampled_token_ranks.tolist() == [1, 2, 3]
    assert told(False, steps) == [None] * 3
    for other in ({"stop": ["x"]}, {"output_kind": RequestOutputKind.DELTA}):
        assert told(True, steps, **other) == steps
    assert told(True, [None, None], logprobs=None) == [None, None]
