import asyncio
import json
import math
import time
from types import SimpleNamespace

import httpx
import pytest
import verifiers as vf
from aiohttp import web
from datasets import Dataset

from tests.helpers import EXAMPLE, load_example, serving
from verifiers_rl.config import RLConfig
from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions, WeightedEnv
from verifiers_rl.envs.classic import ClassicEnvironment, load_environment, samples_from_trajectory
from verifiers_rl.envs.classic_clients import TokenClient, make_client
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.rendering import Renderer
from verifiers_rl.inference.packed_tokens import unpack_ids


def turn(prompt, completion, logprobs=None):
    return {
        "tokens": {
            "prompt_ids": prompt,
            "completion_ids": completion,
            "completion_logprobs": logprobs or [-float(t) for t in completion],
        }
    }


def test_a_single_turn_becomes_one_sample():
    (sample,) = samples_from_trajectory([turn([1, 2], [3, 4])], policy_version=5)
    assert sample.token_ids.tolist() == [1, 2, 3, 4]
    assert sample.loss_mask.tolist() == [False, False, True, True]
    assert sample.inference_logprobs.tolist() == [0.0, 0.0, -3.0, -4.0]
    assert sample.policy_versions.tolist() == [-1, -1, 5, 5]


def test_tokens_on_both_sides_of_a_weight_update_carry_their_versions():
    response = SimpleNamespace(policy_versions=[(0, 3), (2, 4)])
    steps = [{**turn([1], [2, 3, 4]), "response": response}, turn([1, 2, 3, 4, 9], [5])]
    (sample,) = samples_from_trajectory(steps, policy_version=7)
    assert sample.policy_versions.tolist() == [-1, 3, 3, 4, -1, 7]


def test_turns_that_extend_the_tokens_exactly_merge():
    (sample,) = samples_from_trajectory([turn([1], [2, 3]), turn([1, 2, 3, 9, 9], [4])], 0)
    assert sample.token_ids.tolist() == [1, 2, 3, 9, 9, 4]
    assert sample.loss_mask.tolist() == [False, True, True, False, False, True]


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


def test_tokens_and_logprobs_of_different_number_are_refused():
    with pytest.raises(ValueError, match="turn 0: 2 tokens but 1 logprobs"):
        samples_from_trajectory([turn([1], [2, 3], [-1.0])], 0)
    with pytest.raises(ValueError, match="logprob of a sampled token is NaN or infinite"):
        samples_from_trajectory([turn([1], [2, 3], [-1.0, math.nan])], 0)
    with pytest.raises(ValueError, match="turn 0: the server returned no token ids"):
        samples_from_trajectory([{"tokens": None}], 0)


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


def make_env(reward=None, size=4, **options):
    def length(completion) -> float:
        return float(len(completion[-1]["content"]))

    dataset = Dataset.from_dict(
        {"question": [f"q{i}" for i in range(size)], "answer": ["a"] * size}
    )
    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[reward or length]), **options)


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
        return await runner.run_group(
            "train", 1, num_rollouts, "m", {"n": 1}, 2, asyncio.Semaphore(8)
        )

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
    assert runner._client.requests == [("m", {"n": 1})] * 3


def test_the_record_of_a_rollout_has_messages_turns_and_rewards():
    (rollout, *_), _ = run_group(make_env(), say_ok)
    record = json.loads(rollout.record)
    assert [(m["role"], m["content"]) for m in record["messages"]] == [
        ("user", "q1"), ("assistant", "ok"),
    ]  # fmt: skip
    (turn,) = record["turns"]
    assert turn["message"] == 1
    assert (turn["num_prompt_tokens"], turn["num_sampled_tokens"]) == (2, 2)
    assert (turn["policy_version"], turn["finish_reason"]) == (2, "stop")
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


def test_a_reward_function_that_raises_costs_its_rollout_instead_of_scoring_zero():
    def reward(completion, **kwargs) -> float:
        raise KeyError("no such key")

    rollouts, _ = run_group(make_env(reward), say_ok)
    assert all(isinstance(r.error, KeyError) for r in rollouts)


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

    dataset = Dataset.from_dict({"question": ["a", "b"], "answer": ["", ""]})
    late = Late(dataset=dataset, rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
    rollouts, _ = run_group(late, say_ok)
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
    dataset = Dataset.from_dict({"question": ["a", "abc", "abcdef"], "answer": ["", "", ""]})
    env = vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
    runner = ClassicEnvironment(env, with_options(max_prompt_len=3))
    assert runner.sizes("train") == [2]
    assert "1 prompts longer than max_prompt_len=3 left out" in caplog.text
    with pytest.raises(InvalidEnvironmentError, match=r"training dataset is empty, \d were longer"):
        ClassicEnvironment(
            vf.SingleTurnEnv(
                dataset=dataset.select([2]), rubric=vf.Rubric(funcs=[lambda completion: 1.0])
            ),
            with_options(max_prompt_len=3),
        )


def make_mix(tmp_path, *mixed, **options):
    args = RLConfig(output_dir=str(tmp_path), max_seq_len=64, **options)
    return make_runner(list(mixed), "http://unused", WordTokenizer(), args)


def test_a_mix_runs_each_example_in_its_own_environment(tmp_path):
    mix = make_mix(
        tmp_path,
        WeightedEnv(make_env(size=3), "a", weight=2),
        WeightedEnv(make_env(size=2), "b", sampling_args={"max_tokens": 5, "top_k": 7}),
    )
    assert mix.sizes("train") == [3, 2] and mix.weights == [2, 1.0]
    for part in mix.parts:
        part._client = ScriptedClient(say_ok)

    async def run(index):
        own = {"max_tokens": 9}
        return await mix.run_group("train", index, 1, "m", own, 0, asyncio.Semaphore(1))

    rollouts = [asyncio.run(run(index))[0] for index in range(5)]
    assert [(r.env, r.prompt) for r in rollouts] == [
        ("a", "q0"), ("a", "q1"), ("a", "q2"), ("b", "q0"), ("b", "q1"),
    ]  # fmt: skip
    (_, own), (_, others) = mix.parts[1]._client.requests[0], mix.parts[0]._client.requests[0]
    assert (own["max_tokens"], own["extra_body"]["top_k"]) == (5, 7)
    assert others == {"max_tokens": 9}


@pytest.mark.parametrize(
    ("mixed", "error", "message"),
    [
        ([], InvalidEnvironmentError, "at least one"),
        (["x"], InvalidEnvironmentError, "WeightedEnv"),
        (["a", "a"], InvalidEnvironmentError, "two environments are named 'a'"),
        (
            [("a", {"temperature": 2})],
            InvalidEnvironmentError,
            "'a', sampling: temperature=2: cannot",
        ),
        (
            [("a", {"top_p": "1"})],
            InvalidEnvironmentError,
            "'a', sampling: top_p='1': must be a number",
        ),
        ([("a", {"top_p": 3})], InvalidEnvironmentError, "top_p=3: must be > 0 and <= 1"),
    ],
)
def test_a_mix_that_cannot_work_is_one_clear_error(tmp_path, mixed, error, message):
    made = [
        "no WeightedEnv"
        if one == "x"
        else WeightedEnv(make_env(), one)
        if isinstance(one, str)
        else WeightedEnv(make_env(), one[0], sampling_args=one[1])
        for one in mixed
    ]
    with pytest.raises(error, match=message):
        make_mix(tmp_path, *made)
    with pytest.raises(InvalidEnvironmentError, match="weight=-1 must be a number > 0"):
        WeightedEnv(make_env(), "a", weight=-1)


def test_the_token_client_tokenises_new_messages_itself():
    tokenizer = load_example("warm_start").make_tokenizer(["<tool_call>", "</tool_call>"])
    client = TokenClient(object(), Renderer(tokenizer))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    ids = asyncio.run(
        client.tokenize(messages, None, "m", extra_kwargs={"add_generation_prompt": False})
    )
    text = '<|assistant|><tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|end|>'
    assert tokenizer.decode(ids) == text
    parts = {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}
    longer = asyncio.run(client.tokenize([*messages, parts], None, "m"))
    assert tokenizer.decode(longer) == text + "<|user|>a\nb<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("changed", "sends_tokens"),
    [
        ({}, True),
        ({"chat_template": "{{ messages }}"}, False),
        ({"messages": []}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
    ],
)
def test_messages_are_sent_as_tokens_where_they_can_be_rendered_here(changed, sends_tokens):
    tokenizer = load_example("warm_start").make_tokenizer()
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "messages": messages, "max_completion_tokens": 5, **changed}
    seen = []

    async def handler(request):
        seen.append((request.path, await request.json()))
        return web.json_response({})

    async def run():
        async with serving(handler, "/{path:.*}") as url:
            client = make_client("openai_chat_completions_token", url, tokenizer, 10.0)
            try:
                await client.client.post("/chat/completions", cast_to=httpx.Response, body=body)
            finally:
                await client.close()

    asyncio.run(run())
    [(path, sent)] = seen
    if not sends_tokens:
        assert (path, sent) == ("/v1/chat/completions", body)
        return
    assert path == "/v1/chat/completions/tokens"
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert unpack_ids(sent["tokens"]).tolist() == prompt
    assert sent["packed_tokens"] is True and sent["max_completion_tokens"] == 5
    assert sent["messages"] != messages  # the server need not render these


def test_the_renderer_client_passes_all_sampling_options_on(monkeypatch):
    seen = {}

    async def generate(**kwargs):
        seen.update(kwargs)
        return {"content": "ok", "finish_reason": "stop"}

    monkeypatch.setattr("verifiers.legacy.clients.renderer_client.generate", generate)
    tokenizer = load_example("warm_start").make_tokenizer()
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "top_k": 7, "temperature": 1.5}
    sampling = RLConfig(**options).sampling_args()

    async def run():
        client = make_client("renderer", "http://unused", tokenizer, 1.0)
        try:
            return await client.get_native_response([], "m", sampling, state={})
        finally:
            await client.close()

    assert asyncio.run(run())["content"] == "ok"
    assert options.items() <= seen["sampling_params"].items()
    assert "return_token_ids" not in seen["sampling_params"]


def test_something_else_than_an_environment_is_refused():
    with pytest.raises(InvalidEnvironmentError, match=r"expected a verifiers.Environment.*got str"):
        ClassicEnvironment("reverse-text", with_options())


def test_an_empty_dataset_is_refused(tmp_path):
    env = vf.SingleTurnEnv(
        dataset=Dataset.from_dict({"question": [], "answer": []}),
        rubric=vf.Rubric(funcs=[lambda completion: 1.0]),
    )
    with pytest.raises(InvalidEnvironmentError, match="training dataset is empty"):
        ClassicEnvironment(env, with_options())


def test_a_module_beside_the_toml_is_found_without_installing_it():
    env = load_environment("classic_reverse_text", {"num_train": 8, "num_eval": 2}, EXAMPLE)
    assert len(env.get_dataset()) == 8


def test_an_unknown_environment_is_one_clear_error(tmp_path):
    with pytest.raises(
        InvalidEnvironmentError, match=r"cannot load environment 'no_such_env'.*No module named"
    ):
        load_environment("no_such_env", None, tmp_path)
    with pytest.raises(InvalidEnvironmentError, match=r"takes no 'num_trian'; did you .*_train"):
        load_environment("classic_reverse_text", {"num_trian": 1}, EXAMPLE)


def test_the_example_keeps_its_splits_apart():
    module = load_example("classic_reverse_text")
    env = module.load_environment(
        num_train=500, num_eval=100, min_length=3, max_length=3, instruction=""
    )
    train, held_out = set(env.get_dataset()["question"]), set(env.get_eval_dataset()["question"])
    assert len(train) == 500 and len(held_out) == 100 and not train & held_out
