"""Classic environments. These tests run in the Python that has them, see tests/test_foreign.py."""

import asyncio
import json
import math
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import verifiers as vf
from aiohttp import web
from datasets import Dataset

from tests.serving import chat_reply, serving
from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions, Turn, samples_from_turns
from verifiers_rl.envs.classic import CLIENT_TYPES, ClassicEnvironment
from verifiers_rl.inference.packed_tokens import pack_sampled, unpack_numbers
from verifiers_rl.process.loop_thread import contain_tasks
from verifiers_rl.requests import GroupRequest, Places

# --- From turns to samples ------------------------------------------------------------------------


def turn(prompt, completion, logprobs=None, **of_reply):
    """A turn, with what its reply says of its tokens."""
    sampled = np.array(completion), np.array(logprobs or [-float(token) for token in completion])
    of_reply = {"policy_versions": None, "mask": None, "experts": None} | of_reply
    return Turn(prompt, SimpleNamespace(sampled=sampled, **of_reply))


def test_turns_that_extend_the_tokens_merge_and_tokens_carry_what_sampled_them():
    first, second = np.full((4, 1, 1), 1), np.full((6, 1, 1), 2)
    steps = [
        turn([1], [2, 3, 4], policy_versions=[(0, 3), (2, 4)]),
        turn([1, 2, 3, 4, 9], [5], experts=first),
        turn([1, 2, 3, 4, 9, 5], [6], experts=second),
    ]
    (sample,) = samples_from_turns(steps, policy_version=7)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 5, 6]
    assert sample.loss_mask.tolist() == [False, True, True, True, False, True, True]
    assert sample.inference_logprobs.tolist() == [0.0, -2.0, -3.0, -4.0, 0.0, -5.0, -6.0]
    assert sample.policy_versions.tolist() == [-1, 3, 3, 4, -1, 7, 7]
    # A later reply adds the experts of its own tokens only.
    assert sample.extras["routed_experts"].ravel().tolist() == [1, 1, 1, 1, 2, 2, -1]
    (trained,) = samples_from_turns(steps, 7, mask_env_responses=False)
    assert trained.loss_mask.tolist() == [False, *[True] * 6]
    assert np.isnan(trained.inference_logprobs[4])
    assert trained.policy_versions.tolist() == sample.policy_versions.tolist()


def test_a_logprob_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="logprob of a sampled token is NaN or infinite"):
        samples_from_turns([turn([1], [2], [math.nan])], 0)


# --- Rollouts -------------------------------------------------------------------------------------


def one(completion):
    return 1.0


def make_env(*rewards, questions=("q0", "q1"), kind=vf.SingleTurnEnv, **options):
    dataset = Dataset.from_dict({"question": [*questions], "answer": ["a"] * len(questions)})
    rubric = vf.Rubric(funcs=[*(rewards or [one])])
    return kind(dataset=dataset, rubric=rubric, **options)


class Conversation(vf.MultiTurnEnv):
    """Two turns, whatever is answered."""

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="go on")]


class ToolUse(vf.MultiTurnEnv):
    """Two turns, with the answer of a tool between them."""

    async def env_response(self, messages, state, **kwargs):
        return [vf.ToolMessage(content="go on", tool_call_id="1")]


@pytest.fixture
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["TOKENIZER"])


class Server:
    """Answers each request with what `say()` returns and the token that ends a turn, of versions
    5 and 6.

    Attributes:
        thoughts: are sampled before it, and the server's parser takes them out.
    """

    thoughts = ""

    def __init__(self, tokenizer, say):
        self.tokenizer, self.say, self.requests = tokenizer, say, []

    async def answer(self, request):
        body, content = await request.json(), await self.say()
        self.requests.append((request.path, body))
        thoughts = self.tokenizer.encode(self.thoughts)
        token_ids = [*thoughts, *self.tokenizer.encode(content), self.tokenizer.eos_token_id]
        finish = "stop" if len(token_ids) <= body["max_tokens"] else "length"
        n = len(token_ids := token_ids[: body["max_tokens"]])
        reply = chat_reply(content, finish, logprobs={"content": []})
        mask = np.ones(n, int), np.array(token_ids)
        reply["packed_tokens"] = pack_sampled(token_ids, np.full(n, -0.5), mask)
        return web.json_response(reply, headers={"versions": "0:5,1:6"})


# As `RLConfig.sampling_args` makes them.
SAMPLING = {
    "temperature": 1.5,
    "max_tokens": 9,
    "presence_penalty": 0.5,
    "top_k": 7,
    "min_tokens": 1,
    "sampling_mask": True,
}


@pytest.fixture
def play(tokenizer):
    """Plays one group: its rollouts, and the requests that it made."""

    def play(
        env, say="ok", num_rollouts=3, timeout_s=600.0, max_seq_len=200, client_type=None, **options
    ):
        async def reply():
            return await say() if callable(say) else say

        server = Server(tokenizer, reply)

        async def run():
            contain_tasks(asyncio.get_running_loop())  # as a worker does
            async with serving(server.answer, "/{path:.*}") as url:
                where = RunnerOptions(url, tokenizer, max_seq_len, **options)
                played = ClassicEnvironment(env, where, *filter(None, [client_type]))
                await played.open()
                try:
                    request = ("train", 1, num_rollouts, "m", 9, SAMPLING, Places(8), timeout_s)
                    return await played.run_group(GroupRequest(*request))
                finally:
                    await played.close()

        return asyncio.run(run()), server.requests

    return play


@pytest.mark.parametrize("client_type", CLIENT_TYPES)
@pytest.mark.parametrize("text", ["ok", ""])
def test_tokens_are_exact_with_their_versions_and_sampling_options(
    play, tokenizer, text, client_type
):
    env = make_env(lambda completion: float(len(completion)), kind=Conversation, max_turns=2)
    rollouts, requests = play(env, text, num_rollouts=2, client_type=client_type)
    reply = [*tokenizer.encode(text), tokenizer.eos_token_id]
    assert len(requests) == 4
    for path, body in requests:
        assert path == "/v1/chat/completions/tokens"
        asked = body["temperature"], body["presence_penalty"], body["max_tokens"]
        assert asked == (1.5, 0.5, 9)
        assert body["top_k"] == 7 and body["min_tokens"] == 1
    for rollout in rollouts:
        assert rollout.error is None and rollout.num_turns == 2 and rollout.reward == 3.0
        record = json.loads(rollout.record)
        assert [one["role"] for one in record["messages"]] == ["user", "assistant"] * 2
        assert rollout.prompt == record["messages"][0]["content"] == "q1"
        assert abs(record["begun_at"] - time.time()) < 60
        sampled, versions = [], []
        for sample in rollout.samples:
            sampled += sample.token_ids[sample.loss_mask].tolist()
            versions += sample.policy_versions[sample.loss_mask].tolist()
            assert {*sample.inference_logprobs[sample.loss_mask].tolist()} == {-0.5}
            assert "allowed_tokens" in sample.extras
        assert sampled == reply * 2
        assert versions == [5, *[6] * (len(reply) - 1)] * 2
    assert all(len(rollout.samples) == 1 for rollout in rollouts)
    prompts = [unpack_numbers(body["tokens"]).tolist() for _, body in requests]
    first, second = min(prompts, key=len), max(prompts, key=len)
    assert second[: len(first) + len(reply)] == first + reply
    whole = f"<|user|>q1<|end|><|assistant|>{text}<|end|><|user|>go on<|end|><|assistant|>"
    assert tokenizer.decode(second) == whole


@pytest.mark.parametrize(
    "client_type, name, keeps",
    [
        ("openai_chat_completions_token", "mine", True),
        ("openai_chat_completions", "mine", False),
        ("renderer", "mine", False),  # by the chat template
        ("renderer", "Qwen/Qwen3-0.6B", True),  # which the package knows by its name
    ],
)
def test_client_types_keep_the_tokens_so_far_or_render_them_anew(
    play, tokenizer, monkeypatch, client_type, name, keeps
):
    of_qwen = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>")
    tokenizer.add_tokens([*of_qwen, "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.name_or_path = name
    if name.startswith("Qwen"):
        tokenizer.eos_token = "<|im_end|>"
    monkeypatch.setattr(Server, "thoughts", "hm, ")
    env = make_env(kind=ToolUse, max_turns=2)
    (rollout,), requests = play(env, num_rollouts=1, client_type=client_type)
    assert rollout.error is None and len(rollout.samples) == (1 if keeps else 2)
    second = tokenizer.decode(unpack_numbers(requests[1][1]["tokens"]))
    assert ("hm, ok" in second) is keeps and "go on" in second
    assert ("<|im_start|>" in second) is name.startswith("Qwen")


@pytest.mark.parametrize(
    "client_type, template, said",
    [
        ("chat", {}, "client_type='chat': must be one of openai_chat_completions_token, openai_"),
        ("renderer", {"a": 1}, "does not take chat_template_kwargs"),
    ],
)
def test_a_client_type_that_cannot_be_is_refused(client_type, template, said):
    options = RunnerOptions("http://unused", None, 64, chat_template_kwargs=template)
    with pytest.raises(InvalidEnvironmentError, match=said):
        ClassicEnvironment(make_env(), options, client_type)


@pytest.mark.parametrize(
    "outcome, said",
    [
        (KeyError("no such key"), "no such key"),  # verifiers would score 0
        (math.nan, "reward is nan"),
        *(
            (error, f"code of the environment raised {error!r}")
            for error in (SystemExit(3), asyncio.CancelledError())
        ),
    ],
)
def test_a_reward_function_that_fails_costs_its_own_rollout(play, outcome, said):
    def reward(completion) -> float:
        if isinstance(result := next(outcomes), float):
            return result
        raise result

    for env in (make_env(reward), vf.EnvGroup([make_env(reward), make_env()], ["a", "b"])):
        outcomes = iter([1.0, outcome, 1.0])
        errors = [rollout.error for rollout in play(env)[0]]
        (found,) = [error for error in errors if error is not None]
        assert said in str(found)


def test_a_timeout_is_that_of_who_set_it(play):
    async def slow(completion=None):
        await asyncio.sleep(30)

    class Late(vf.SingleTurnEnv):
        async def rollout(self, *args, **kwargs):
            raise TimeoutError("the database did not answer")

    for env, say, timeout_s, said in (
        (make_env(), slow, 0.05, "generation_timeout (0.05 s)"),
        (make_env(slow), "ok", 0.5, "scoring took longer than generation_ti"),
        (make_env(kind=Late), "ok", 600.0, "the database did not answer"),
    ):
        for rollout in play(env, say, timeout_s=timeout_s)[0]:
            assert said in str(rollout.error)
            assert ("generation_ti" in str(rollout.error)) == (timeout_s < 600)


def test_max_seq_len_cuts_and_marks_as_truncated(play):
    rollouts, requests = play(make_env(), "x" * 100, max_seq_len=8)
    assert {body["max_tokens"] for _, body in requests} == {3}
    assert all(r.is_truncated and len(r.samples[0].token_ids) == 8 for r in rollouts)


# --- Examples -------------------------------------------------------------------------------------


def test_overlong_prompts_are_left_out(tokenizer, caplog):
    """The template adds three tokens, and a letter is one."""
    env = make_env(questions=["a", "abc", "abcdef"])
    options = RunnerOptions("http://unused", tokenizer, 64, max_prompt_len=6)
    assert ClassicEnvironment(env, options).sizes("train") == [2]
    assert "1 prompts" in caplog.messages[-1] and "max_prompt_len=6" in caplog.messages[-1]
    with pytest.raises(InvalidEnvironmentError, match=r"no example; \d had overlong"):
        ClassicEnvironment(env, replace(options, max_prompt_len=3))
