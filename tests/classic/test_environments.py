"""Classic environments. These tests run in the Python that has them, see tests/test_foreign.py."""

import asyncio
import json
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import verifiers as vf
from aiohttp import web
from datasets import Dataset

from verifiers_rl.data import describe_error
from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions
from verifiers_rl.envs.classic import ClassicEnvironment, samples_from_trajectory
from verifiers_rl.envs.made_there import make_environment
from verifiers_rl.inference.packed_tokens import pack_sampled, unpack_ids
from verifiers_rl.process.loop_thread import contain_tasks
from verifiers_rl.requests import GroupRequest, Places


def turn(prompt, completion, logprobs=None):
    return {
        "tokens": {
            "prompt_ids": prompt,
            "completion_ids": completion,
            "completion_logprobs": logprobs or [-float(t) for t in completion],
        }
    }


def test_turns_that_extend_the_tokens_merge_and_tokens_carry_the_version_that_sampled_them():
    reply = SimpleNamespace(policy_versions=[(0, 3), (2, 4)], mask=None, experts=None)
    response = SimpleNamespace(reply=reply)
    steps = [{**turn([1], [2, 3, 4]), "response": response}, turn([1, 2, 3, 4, 9, 9], [5])]
    (sample,) = samples_from_trajectory(steps, policy_version=7)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert sample.loss_mask.tolist() == [False, True, True, True, False, False, True]
    assert sample.inference_logprobs.tolist() == [0.0, -2.0, -3.0, -4.0, 0.0, 0.0, -5.0]
    assert sample.policy_versions.tolist() == [-1, 3, 3, 4, -1, -1, 7]


def test_a_turn_that_rewrites_the_past_starts_a_new_sample():
    samples = samples_from_trajectory(
        [turn([1], [2, 3]), turn([1, 2, 9], [4]), turn([1, 2, 9, 4], [5])], 0
    )
    assert [s.token_ids.tolist() for s in samples] == [[1, 2, 3], [1, 2, 9, 4, 5]]
    # Each sampled token is trained exactly once.
    trained = [t for s in samples for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m]
    assert trained == [2, 3, 4, 5]


def test_mask_env_responses_decides_over_tokens_between_turns():
    steps = [turn([1], [2]), turn([1, 2, 9], [4])]
    (masked,) = samples_from_trajectory(steps, 0, mask_env_responses=True)
    (trained,) = samples_from_trajectory(steps, 0, mask_env_responses=False)
    assert masked.loss_mask.tolist() == [False, True, False, True]
    assert trained.loss_mask.tolist() == [False, True, True, True]
    assert math.isnan(trained.inference_logprobs[2]) and trained.policy_versions[2] == -1


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (turn([1], [2, 3], [-1.0]), "turn 0: 2 tokens but 1 logprobs"),
        (turn([1], [2, 3], [-1.0, math.nan]), "logprob of a sampled token is NaN or infinite"),
        ({"tokens": None}, "turn 0: the server returned no token ids"),
    ],
)
def test_tokens_that_cannot_be_trained_on_are_refused(step, problem):
    with pytest.raises(ValueError, match=problem):
        samples_from_trajectory([step], 0)


class ScriptedClient(vf.Client):
    """Answers without a server: what `reply(prompt text)` says."""

    def __init__(self, reply):
        super().__init__(object())
        self.reply = reply
        self.requests = []

    def setup_client(self, config): ...

    async def to_native_tool(self, tool):
        return tool

    async def to_native_prompt(self, messages):
        return messages, {}

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        self.requests.append((model, sampling_args))
        return await self.reply(prompt[-1].content)

    async def raise_from_native_response(self, response): ...

    async def from_native_response(self, text):
        from verifiers.types import Response, ResponseMessage, ResponseTokens

        ids = list(text.encode())
        tokens = ResponseTokens(
            prompt_ids=[1, 2],
            prompt_mask=[0, 0],
            completion_ids=ids,
            completion_mask=[1] * len(ids),
            completion_logprobs=[-0.5] * len(ids),
        )
        message = ResponseMessage(
            content=text, finish_reason="stop", is_truncated=False, tokens=tokens, tool_calls=None
        )
        return Response(id="x", created=0, model="m", usage=None, message=message)

    async def close(self): ...

    def of_rollout(self, session):
        return self


def length(completion) -> float:
    return float(len(completion[-1]["content"]))


def make_env(reward=length, questions=("q0", "q1", "q2", "q3"), kind=vf.SingleTurnEnv):
    dataset = Dataset.from_dict({"question": [*questions], "answer": ["a"] * len(questions)})
    return kind(dataset=dataset, rubric=vf.Rubric(funcs=[reward]))


class WordTokenizer:
    def apply_chat_template(self, messages, **kwargs):
        return [0] * len(messages[-1]["content"])


def with_options(**options):
    options = {"tokenizer": WordTokenizer(), "max_seq_len": 64, **options}
    return RunnerOptions("http://unused", **options)


def run_group(env, reply, num_rollouts=3, **options):
    runner = ClassicEnvironment(env, with_options(**options))
    runner._client = ScriptedClient(reply)

    async def run():
        timeout_s = options.get("timeout_s", 600.0)
        contain_tasks(asyncio.get_running_loop())  # as a worker does
        request = GroupRequest("train", 1, num_rollouts, "m", 2, {"n": 1}, Places(8), timeout_s)
        return await runner.run_group(request)

    return asyncio.run(run()), runner


async def say_ok(text):
    return "ok"


def test_a_group_is_rolled_out_and_scored():
    rollouts, runner = run_group(make_env(), say_ok)
    assert [r.reward for r in rollouts] == [2.0] * 3
    assert (
        rollouts[0].prompt == "q1" and rollouts[0].completion == "ok" and rollouts[0].num_turns == 1
    )
    assert rollouts[0].samples[0].token_ids.tolist() == [1, 2, *b"ok"]
    assert rollouts[0].samples[0].policy_versions.tolist() == [-1, -1, 2, 2]
    assert runner._client.requests == [("m", {"extra_body": {"n": 1}})] * 3
    record = json.loads(rollouts[0].record)
    assert [(m["role"], m["content"]) for m in record["messages"]] == [
        ("user", "q1"), ("assistant", "ok"),
    ]  # fmt: skip
    assert abs(record["begun_at"] - time.time()) < 60


def test_an_exception_in_one_rollout_costs_only_that_one():
    count = iter(range(3))

    async def reply(text):
        if next(count) == 1:
            raise ZeroDivisionError("in the environment")
        return "ok"

    rollouts, _ = run_group(make_env(), reply)
    failed = [r for r in rollouts if r.error is not None]
    assert len(failed) == 1 and math.isnan(failed[0].reward) and not failed[0].samples
    assert "in the environment" in str(failed[0].error.__cause__)
    assert [r.reward for r in rollouts if r.error is None] == [2.0, 2.0]


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit(), KeyError("no such key")]
)
def test_a_reward_function_that_raises_costs_its_rollout_instead_of_scoring_zero(error):
    count = iter(range(3))

    def reward(completion) -> float:
        if next(count) == 1:
            raise error
        return 1.0

    rollouts, _ = run_group(make_env(reward), say_ok)
    errors = [rollout.error for rollout in rollouts if rollout.error is not None]
    said = (
        str(error) if isinstance(error, KeyError) else f"code of the environment raised {error!r}"
    )
    assert [str(found) for found in errors] == [said]


def test_reward_functions_keep_their_arguments():
    seen = []

    def plain(answer) -> float:
        seen.append(answer)
        return 1.0

    async def with_state(state, completion) -> float:
        seen.append(state["answer"])
        return 2.0

    def grouped(states) -> list[float]:
        return [3.0] * len(states)

    env = make_env()
    env.rubric = vf.Rubric(funcs=[plain, with_state, grouped])
    rollouts, _ = run_group(env, say_ok, num_rollouts=2)
    assert [r.error for r in rollouts] == [None, None]
    assert [r.reward for r in rollouts] == [6.0, 6.0]
    assert seen == ["a"] * 4


def test_a_reward_that_is_no_number_is_an_error():
    rollouts, _ = run_group(make_env(lambda completion: math.nan), say_ok)
    assert all("reward is nan" in str(r.error) for r in rollouts)


def test_a_rollout_beyond_generation_timeout_is_an_error():
    async def reply(text):
        await asyncio.sleep(30)

    rollouts, _ = run_group(make_env(), reply, timeout_s=0.05)
    assert all("generation_timeout (0.05 s)" in str(r.error) for r in rollouts)


def test_an_environments_own_timeout_is_not_taken_for_generation_timeout():
    class Late(vf.SingleTurnEnv):
        async def rollout(self, *args, **kwargs):
            raise TimeoutError("the database did not answer")

    async def slow(completion):
        await asyncio.sleep(30)

    rollouts, _ = run_group(make_env(kind=Late), say_ok)
    assert all("the database did not answer" in str(r.error) for r in rollouts)
    assert not any("generation_timeout" in str(r.error) for r in rollouts)
    rollouts, _ = run_group(make_env(slow), say_ok, timeout_s=0.5)
    assert all("scoring a group took longer than generation_ti" in str(r.error) for r in rollouts)


def test_an_image_in_the_first_prompt_is_refused_at_the_start():
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    prompt = [{"role": "user", "content": [picture]}]
    env = vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"prompt": prompt, "answer": ""}]),
        rubric=vf.Rubric(funcs=[lambda completion: 1.0]),
    )
    with pytest.raises(InvalidEnvironmentError, match="'image_url': images and other media"):
        ClassicEnvironment(env, with_options(tokenizer=None))


def test_max_seq_len_cuts_and_marks_as_truncated():
    async def reply(text):
        return "x" * 100

    rollouts, _ = run_group(make_env(), reply)
    assert all(r.is_truncated and len(r.samples[0].token_ids) == 64 for r in rollouts)


def test_max_prompt_len_leaves_examples_out(caplog):
    env = make_env(questions=["a", "abc", "abcdef"])
    runner = ClassicEnvironment(env, with_options(max_prompt_len=3))
    assert runner.sizes("train") == [2]
    assert "1 prompts longer than max_prompt_len=3 left out" in caplog.text
    assert ClassicEnvironment(env, with_options(max_seq_len=4)).sizes("train") == [2]
    assert "1 prompts that fill max_seq_len=4 (raise it, or set max_prompt_len)" in caplog.text
    for questions in (["abcdef"], []):
        with pytest.raises(InvalidEnvironmentError, match=r"no example; \d had overlong"):
            ClassicEnvironment(make_env(questions=questions), with_options(max_prompt_len=3))


class Conversation(vf.MultiTurnEnv):
    """Two turns, whatever is answered."""

    def __init__(self, **options):
        super().__init__(max_turns=2, **options)

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="go on")]


@pytest.fixture
def tokenizer(monkeypatch):
    from renderers import client
    from transformers import AutoTokenizer

    monkeypatch.setattr(client, "_max_prompt_len_lock", asyncio.Lock())  # for a loop of this test
    return AutoTokenizer.from_pretrained(os.environ["TOKENIZER"])


class Server:
    """Answers each request with "ok" and the token that ends a turn, of versions 5 and 6."""

    def __init__(self, tokenizer, content="ok"):
        self.ids = [*tokenizer.encode(content), tokenizer.eos_token_id]
        self.tokenizer, self.content, self.requests = tokenizer, content, []

    async def answer(self, request):
        body = await request.json()
        self.requests.append((request.path, body))
        n = len(self.ids)
        choice = {"index": 0, "finish_reason": "stop", "logprobs": {"content": []}}
        choice["message"] = {"role": "assistant", "content": self.content}
        reply = {"object": "chat.completion", "created": 0, "model": body["model"]}
        reply["id"] = f"{len(self.requests)}"
        reply["choices"] = [choice]
        if request.path.endswith("/tokens"):
            mask = np.ones(n, int), np.array(self.ids)
            reply["packed_tokens"] = pack_sampled(self.ids, np.full(n, -0.5), mask)
        else:
            logprob = {"token": "x", "logprob": -0.5, "top_logprobs": []}
            choice |= {"token_ids": self.ids, "logprobs": {"content": [logprob] * n}}
            reply["prompt_token_ids"] = self.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_dict=False
            )
        return web.json_response(reply, headers={"X-Policy-Versions": "0:5,1:6"})

    async def play(self, env, **options):
        app = web.Application()
        app.router.add_post("/{path:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        options = RunnerOptions(url, self.tokenizer, max_seq_len=200, **options)
        played = ClassicEnvironment(env, options)
        await played.open()
        try:
            return await played.run_group(GroupRequest("train", 0, 2, "m", 9, SAMPLING, Places(8)))
        finally:
            await played.close()
            await runner.cleanup()


# As `RLConfig.sampling_args` makes them.
SAMPLING = {
    "temperature": 1.5,
    "max_tokens": 9,
    "presence_penalty": 0.5,
    "logprobs": True,
    "extra_body": {"top_k": 7, "min_tokens": 1, "return_token_ids": True, "sampling_mask": True},
}
CLIENT_TYPES = ("openai_chat_completions", "openai_chat_completions_token", "renderer")


@pytest.mark.parametrize("client_type", CLIENT_TYPES)
def test_each_client_keeps_exact_tokens_versions_and_sampling_options(tokenizer, client_type):
    server = Server(tokenizer)
    env = make_env(lambda completion: float(len(completion)), ["ab", "cd"], Conversation)
    rollouts = asyncio.run(server.play(env, client_type=client_type))
    sends_tokens = client_type != "openai_chat_completions"
    assert len(server.requests) == 4
    for path, body in server.requests:
        expected = "/v1/chat/completions" + "/tokens" * sends_tokens
        assert path == expected
        limit = body.get("max_tokens") or body["max_completion_tokens"]
        assert (body["temperature"], body["presence_penalty"], limit) == (1.5, 0.5, 9)
        assert body["top_k"] == 7 and body["min_tokens"] == 1
    for rollout in rollouts:
        assert rollout.error is None and rollout.num_turns == 2 and rollout.reward == 3.0
        sampled = []
        for sample in rollout.samples:
            sampled += sample.token_ids[sample.loss_mask].tolist()
            assert set(sample.inference_logprobs[sample.loss_mask].tolist()) == {-0.5}
            assert ("allowed_tokens" in sample.extras) == sends_tokens
        assert sampled == server.ids * 2
        versions = np.concatenate([s.policy_versions for s in rollout.samples])
        assert versions[versions >= 0].tolist() == [5, *[6] * (len(server.ids) - 1)] * 2
    if client_type == "openai_chat_completions_token":
        assert all(len(rollout.samples) == 1 for rollout in rollouts)
        prompts = [unpack_ids(body["tokens"]).tolist() for _, body in server.requests]
        first, second = min(prompts, key=len), max(prompts, key=len)
        assert second[: len(first) + len(server.ids)] == first + server.ids
        text = "<|user|>ab<|end|><|assistant|>ok<|end|><|user|>go on<|end|><|assistant|>"
        assert tokenizer.decode(second) == text


@pytest.mark.parametrize("client_type", CLIENT_TYPES)
def test_an_empty_reply_is_trained_on(tokenizer, client_type):
    server = Server(tokenizer, "")
    rollouts = asyncio.run(server.play(make_env(), client_type=client_type))
    assert [rollout.error for rollout in rollouts] == [None, None]
    tokens = rollouts[0].samples[0]
    assert tokens.token_ids[tokens.loss_mask].tolist() == [tokenizer.eos_token_id]


def test_an_environment_that_cannot_be_loaded_is_one_error(tmp_path, monkeypatch):
    recipe = {"options": vars(with_options(tokenizer="")), "folders": [str(tmp_path)]}

    def error_of(**table):
        with pytest.raises(Exception) as caught:
            make_environment({**recipe, "table": table})
        return describe_error(caught.value)

    monkeypatch.setattr(sys, "path", [*sys.path])
    said = error_of(id="me/no-such@1.0")
    assert "'me/no-such'" in said and "is installed" in said and "No module named" in said
    (tmp_path / "odd_env.py").write_text("def load_environment(size=3): return size\n")
    assert "argument 'sise'" in error_of(id="odd-env", args={"sise": 1})


def test_the_example_is_the_task_of_the_v1_example(monkeypatch):
    monkeypatch.syspath_prepend("examples/classic")
    env = vf.load_environment("classic_reverse_text", num_train=500, num_eval=100)
    train, held_out = set(env.get_dataset()["question"]), set(env.get_eval_dataset()["question"])
    assert len(train) == 500 and len(held_out) == 100 and not train & held_out
    rows = json.loads(Path(os.environ["V1_TASKS"]).read_text())
    for split, dataset in (("train", env.get_dataset()), ("eval", env.get_eval_dataset())):
        assert [[row["question"], row["answer"]] for row in dataset] == rows[split]
