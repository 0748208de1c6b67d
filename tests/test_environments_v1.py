"""Environments of verifiers.v1, against a stand-in for vf-vllm that answers over HTTP."""

import asyncio
import base64
import copy
import io
import json
import math
import os
import re
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import verifiers.v1 as vf
from aiohttp import web

from tests.helpers import load_example, make_env, make_request, only_runner, serving, values_of
from verifiers_rl import RLConfig, WeightedEnv
from verifiers_rl.advantages import center_on_group_mean, of_rewards, set_advantages
from verifiers_rl.data import GroupFilter
from verifiers_rl.envs.base import InvalidEnvironmentError, RunnerOptions
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.records import text_of
from verifiers_rl.envs.v1 import V1Environment, samples_from_trace
from verifiers_rl.envs.v1_client import AssistantMessage
from verifiers_rl.envs.v1_loading import load_v1_environment
from verifiers_rl.envs.workers import pack_group, unpack_group
from verifiers_rl.inference.packed_tokens import pack_sampled, unpack_ids
from verifiers_rl.inference.rollout_client import ServerClient
from verifiers_rl.report.means import batch_metrics
from verifiers_rl.requests import Places
from verifiers_rl.types import Rollout, Sample

HERE = Path(__file__).parent / "v1"
NULL = {"id": "null"}


@pytest.fixture(scope="module")
def tokenizer():
    """Drops the thinking of past turns and writes some for the last, as Qwen3's template does."""
    tokenizer = load_example("warm_start").make_tokenizer(["<|tool|>", "<tool_call>"])
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- message['content'] or '' -}}",
        "{%- if loop.last -%}{{- '<think></think>' + (message['content'] or '') -}}"
        "{%- else -%}{{- (message['content'] or '').split('</think>')[-1] -}}{%- endif -%}",
    )
    return tokenizer


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def load(taskset="small_tasks", harness=NULL, **table):
    table = {"taskset": {"id": taskset} | table.pop("options", {})} | table
    if harness:
        table["agent"] = {**table.get("agent", {}), "harness": harness}
    return load_v1_environment(table)


def first(num_tasks, taskset):
    return getattr(taskset, "take" if hasattr(taskset, "take") else "head")(num_tasks)


class Server:
    """Answers with what `say` returns for the prompt's text: text, or a tool call as a dict."""

    def __init__(self, tokenizer, say):
        self.tokenizer, self.say = tokenizer, say
        self.requests = []  # each with the tokens of its reply

    async def answer(self, request):
        body = await request.json()
        body["tokens"] = unpack_ids(body["tokens"]).tolist()
        said = self.say(self.tokenizer.decode(body["tokens"]))
        text = said if isinstance(said, str) else f"<tool_call>{json.dumps(said)}"
        tokens = [*self.tokenizer(text, add_special_tokens=False).input_ids]
        finish = "stop"
        if len(tokens) >= body["max_tokens"]:
            tokens, finish = tokens[: body["max_tokens"]], "length"
            text = self.tokenizer.decode(tokens)
        else:
            tokens.append(self.tokenizer.eos_token_id)
        version = len(self.requests)
        self.requests.append((body, tokens))
        message = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        if not isinstance(said, str):
            call = {"id": f"call-{version}", "type": "function", "function": said}
            message |= {"content": None, "tool_calls": [call]}
            finish = "tool_calls"
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": finish,
            "logprobs": {"content": []},
        }
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
        logprobs = np.array([-0.1 * (t % 7) for t in tokens])
        mask = None
        if body.get("sampling_mask"):  # each token and the one after it; any, for even ones
            counts = np.array([2 * (t % 2) for t in tokens])
            mask = counts, np.array([[t, t + 1] for t in tokens if t % 2]).reshape(-1)
        num_rows = len(body["tokens"]) + len(tokens) - 1
        experts = io.BytesIO()
        np.save(experts, np.full((num_rows, 1, 2), version, np.uint8))
        choice["routed_experts"] = base64.b64encode(experts.getvalue()).decode()
        packed = pack_sampled(tokens, logprobs, mask)
        reply |= {"choices": [choice], "usage": None, "packed_tokens": packed}
        return web.json_response(reply, headers={"X-Policy-Versions": f"0:{version}"})


def play(env, tokenizer, tmp_path, say, index=0, num_rollouts=1, split="train", **options):
    """One group, and the requests that it made."""
    defaults = {"max_seq_len": 200, "max_tokens": 40, "use_cpu": True, "env_workers": 0}
    args = RLConfig(output_dir=str(tmp_path), **defaults | options)
    server = Server(tokenizer, say)

    async def run():
        async with serving(server.answer, "/v1/chat/completions/tokens") as url:
            return await use(make_runner(env, url, tokenizer, args))

    async def use(runner):
        try:
            await runner.open()
            places = Places(options.get("max_concurrent", 4))
            sampling = args.sampling_args() if split == "train" else args.eval_sampling_args()
            return await runner.run_group(
                make_request(
                    index, num_rollouts, split, sampling_args=sampling, places=places,
                    timeout_s=args.generation_timeout,
                )
            )  # fmt: skip
        finally:
            await runner.close()

    return asyncio.run(run()), server.requests


@pytest.fixture(scope="module")
def play_with_tools(tokenizer, tmp_path_factory):
    """Plays groups of tool_tasks, all with one tool server, which takes seconds to start."""
    server = Server(tokenizer, None)
    folder = str(tmp_path_factory.mktemp("tools"))
    options = {"max_seq_len": 400, "max_tokens": 90, "use_cpu": True, "tools_in_process": False}
    args = RLConfig(output_dir=folder, env_workers=0, **options)
    with asyncio.Runner() as loop:
        listening = serving(server.answer, "/v1/chat/completions/tokens")
        url = loop.run(listening.__aenter__())
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(HERE))
            patch.setenv("PYTHONPATH", str(HERE))
            env = load("tool_tasks", agent={"max_turns": 3})
            runner = make_runner(env, url, tokenizer, args)
            loop.run(runner.open())

        def play(say, max_tokens=40):
            server.say, server.requests = say, []
            sampling = args.sampling_args() | {"max_tokens": max_tokens}
            group = runner.run_group(make_request(sampling_args=sampling))
            return loop.run(group), server.requests

        yield play
        loop.run(runner.close())
        loop.run(listening.__aexit__(None, None, None))


def check_tokens(rollouts, requests):
    """The sampled tokens of all requests are those trained: each once, with its logprob and its
    version, after exactly the tokens that the server was prompted with.
    """
    trained = sorted(
        (
            sample.policy_versions[at],
            list(sample.token_ids[:at]),
            token,
            sample.inference_logprobs[at],
        )
        for rollout in rollouts
        for sample in rollout.samples
        for at, token in enumerate(sample.token_ids)
        if sample.loss_mask[at]
    )
    expected = sorted(
        (version, [*body["tokens"], *tokens[:at]], token, np.float32(-0.1 * (token % 7)))
        for version, (body, tokens) in enumerate(requests)
        for at, token in enumerate(tokens)
    )
    assert [found[:3] for found in trained] == [wanted[:3] for wanted in expected]
    assert [found[3] for found in trained] == [wanted[3] for wanted in expected]
    for rollout in rollouts:
        for sample in rollout.samples:
            assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.policy_versions)


def test_a_taskset_is_played_by_one_agent(tokenizer, tmp_path):
    rollouts, requests = play(load(), tokenizer, tmp_path, lambda _: "yes", num_rollouts=2)
    for rollout in rollouts:
        assert rollout.error is None, rollout.error
        assert (rollout.reward, rollout.prompt, rollout.num_turns) == (3.0, "question 0", 1)
        assert rollout.metrics == {"length": 3.0, "tools_called": 0.0}
        assert not rollout.is_truncated and rollout.generation_s > 0
        assert rollout.completion == "yes"
    check_tokens(rollouts, requests)
    body, _ = requests[0]
    assert body["tokens"] == tokenizer.apply_chat_template(
        [{"role": "user", "content": "question 0"}], add_generation_prompt=True, return_dict=False
    )
    assert body["return_token_ids"] is True and body["logprobs"] is True
    assert (body["max_tokens"], body["temperature"], body["top_k"]) == (40, 0.7, -1)


def test_advantages_that_a_trace_carries_are_those_of_its_tokens(tokenizer, tmp_path):
    env = load("graded_tasks")
    (rollout,), requests = play(env, tokenizer, tmp_path, lambda _: "yes")
    assert rollout.error is None and rollout.has_own_advantages
    (sample,) = rollout.samples
    num_sampled = len(requests[0][1])
    given = [0.5 + at for at in range(num_sampled)]
    prompt = [0.0] * (len(sample.token_ids) - num_sampled)
    assert sample.advantages.tolist() == prompt + given
    assert rollout.advantage == pytest.approx(sum(given) / num_sampled)
    (plain,), _ = play(env, tokenizer, tmp_path, lambda _: "yes", index=1)
    assert plain.error is None and not plain.has_own_advantages


def test_the_record_of_a_rollout_has_its_turns_tool_calls_and_times(tokenizer, tmp_path):
    def say(prompt):
        if "<|tool|>8<|end|>" in prompt:
            return "it is 8"
        return {"name": "double", "arguments": '{"x":4}'}

    began = time.time()
    env = load("tool_tasks", agent={"max_turns": 3})
    (rollout,), requests = play(env, tokenizer, tmp_path, say, max_seq_len=400, max_tokens=90)
    assert rollout.error is None, rollout.error
    record = json.loads(rollout.record)
    asked, call, result, said = record["messages"][-4:]
    (made,) = call["tool_calls"]
    assert made["function"] == {"name": "double", "arguments": '{"x":4}'}
    assert (result["role"], result["content"]) == ("tool", "8")
    assert result["tool_call_id"] == made["id"]
    assert (asked["role"], said["content"]) == ("user", "it is 8")
    assert [record["messages"][turn["message"]] for turn in record["turns"]] == [call, said]
    assert began <= record["begun_at"] <= time.time()
    times = [turn[name] for turn in record["turns"] for name in ("begin_s", "end_s")]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 60
    for turn, (body, tokens), version in zip(record["turns"], requests, (0, 1), strict=True):
        assert turn["num_prompt_tokens"] == len(body["tokens"])
        assert turn["num_sampled_tokens"] == len(tokens)
        assert turn["policy_version"] == version
    assert [turn["finish_reason"] for turn in record["turns"]] == ["tool_calls", "stop"]
    assert "other_branches" not in record
    # What it costs: the text, and some hundred bytes a turn. Nothing a token.
    assert len(rollout.record) < 1500


def test_the_record_of_a_failed_rollout_has_what_was_said_until_then(tokenizer, tmp_path):
    (rollout,), _ = play(load(), tokenizer, tmp_path, lambda _: "yes", index=3)
    record = json.loads(rollout.record)
    assert rollout.error is not None
    assert [message["content"] for message in record["messages"]] == ["question 3", "yes"]


def test_a_system_prompt_leads(tokenizer, tmp_path):
    (rollout,), requests = play(load(), tokenizer, tmp_path, lambda _: "yes", index=2)
    assert rollout.error is None
    prompt = tokenizer.decode(requests[0][0]["tokens"])
    assert prompt == "<|system|>be brief<|end|><|user|>question 2<|end|><|assistant|>"


def test_an_error_of_the_environment_costs_its_episode(tokenizer, tmp_path):
    (rollout,), _ = play(load(), tokenizer, tmp_path, lambda _: "yes", index=3)
    assert "no answer key" in str(rollout.error) and not rollout.samples
    assert "small_tasks.py" in rollout.error.__notes__[0]


def test_errors_of_the_server_reach_the_rollout(tokenizer, tmp_path):
    def say(prompt):
        raise web.HTTPBadRequest(text="no such model")

    (rollout,), _ = play(load(), tokenizer, tmp_path, say)
    assert str(rollout.error) == "ProviderError: no such model" and not rollout.samples


def test_an_agent_that_runs_out_of_its_time_is_an_error(tokenizer, tmp_path, monkeypatch):
    async def late(self, path, **kwargs):
        await asyncio.sleep(10)

    monkeypatch.setattr(ServerClient, "post", late)
    env = load(agent={"timeout": {"rollout": 0.3}})
    (rollout,), requests = play(env, tokenizer, tmp_path, lambda _: "yes")
    assert not requests and not rollout.samples
    assert "ran out of its own time" in str(rollout.error)


def test_a_program_that_asks_for_a_stream_is_trained(tokenizer, tmp_path):
    here = {"runtime": {"type": "subprocess"}}
    env = load(harness={"id": "streaming_harness"}, agent=here)
    (rollout,), requests = play(env, tokenizer, tmp_path, lambda _: "yes")
    assert rollout.error is None, rollout.error
    check_tokens([rollout], requests)
    ((body, _),) = requests
    assert body["max_tokens"] == 40 and not {"stream", "max_completion_tokens"} & body.keys()


@pytest.mark.slow
def test_a_tool_call_that_the_taskset_refuses_is_not_made(tokenizer, tmp_path):
    def say(prompt):
        call = {"name": "double", "arguments": '{"x": 4}'}
        return "fine" if "not today" in prompt else call

    (rollout,), requests = play(load("gated_tasks"), tokenizer, tmp_path, say, max_tokens=80)
    assert rollout.error is None, rollout.error
    assert rollout.num_turns == 2 and "tool: not today" in rollout.completion
    check_tokens([rollout], requests)


def think(prompt):
    return f"<think>hm</think>{prompt.count('<|user|>')}"


def test_turns_with_a_user_are_one_sample_though_the_template_drops_thinking(tokenizer, tmp_path):
    env = load(id="user_env", harness=None)
    (rollout,), requests = play(env, tokenizer, tmp_path, think)
    assert rollout.error is None, rollout.error
    assert rollout.num_turns == 3 and len(rollout.samples) == 1
    assert rollout.completion.startswith(
        "assistant: <think>hm</think>1\nuser: and? 18\nassistant: "
    )
    check_tokens([rollout], requests)
    (sample,) = rollout.samples
    assert tokenizer.decode(sample.token_ids) == (
        "<|user|>question 0<|end|><|assistant|><think>hm</think>1<|end|>"
        "<|user|>and? 18<|end|><|assistant|><think>hm</think>2<|end|>"
        "<|user|>more? 18<|end|><|assistant|><think>hm</think>3<|end|>"
    )
    assert {v for v, m in zip(sample.policy_versions, sample.loss_mask, strict=True) if m} == {
        0, 1, 2,
    }  # fmt: skip


def test_allowed_tokens_and_experts_are_those_of_the_turn_that_computed_a_token(
    tokenizer, tmp_path
):
    env, options = load(id="user_env", harness=None), {"top_k": 9, "router_replay": True}
    (rollout,), requests = play(env, tokenizer, tmp_path, think, sampling_mask=True, **options)
    assert rollout.error is None, rollout.error
    (sample,) = rollout.samples
    is_odd = sample.loss_mask & (sample.token_ids % 2 == 1)
    allowed = np.where(is_odd[:, None], sample.token_ids[:, None] + [0, 1], -1)
    assert sample.extras["allowed_tokens"].tolist() == allowed.tolist()
    # A turn returns the experts of all tokens but its last one.
    ends = [0, *(len(body["tokens"]) + len(tokens) - 1 for body, tokens in requests)]
    turns = [*np.repeat([0, 1, 2], np.diff(ends)), -1]
    assert sample.extras["routed_experts"].tolist() == [[[turn, turn]] for turn in turns]
    (plain,), _ = play(env, tokenizer, tmp_path, think)
    assert not plain.samples[0].extras


def test_an_empty_reply_is_trained_on(tokenizer, tmp_path):
    env = load(id="user_env", harness=None)
    (rollout,), requests = play(env, tokenizer, tmp_path, lambda _: "")
    assert rollout.error is None and rollout.num_turns == 3 and len(rollout.samples) == 1
    assert [tokens for _, tokens in requests] == [[tokenizer.eos_token_id]] * 3
    check_tokens([rollout], requests)


@pytest.mark.parametrize(("text", "num_samples"), [("x?yx?", 1), ("<think>hm", 1), ("</think>", 3)])
def test_after_a_cut_reply_the_prompt_is_rendered_anew(tokenizer, tmp_path, text, num_samples):
    """The template then ends the reply, or rewrites it, which starts a sample."""
    env = load(id="user_env", harness=None)
    limit = len(tokenizer(text, add_special_tokens=False).input_ids)
    (rollout,), requests = play(env, tokenizer, tmp_path, lambda _: text, max_tokens=limit)
    assert rollout.error is None, rollout.error
    assert rollout.is_truncated and rollout.num_turns == 3
    assert len(rollout.samples) == num_samples
    check_tokens([rollout], requests)
    history = [{"role": "user", "content": "question 0"}, {"role": "assistant", "content": text}]
    history.append({"role": "user", "content": f"and? {limit}"})
    second = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
    assert requests[1][0]["tokens"] == second


def test_an_agent_samples_at_the_trainers_temperature_or_not_at_all(tokenizer, tmp_path):
    for sampling, error in (
        ({"temperature": 0.2}, "'agent' samples at temperature=0.2, and the trainer"),
        ({"temperature": 0.7, "top_p": 0.5, "max_tokens": 2}, None),
    ):
        env = load(agent={"sampling": sampling})
        (rollout,), requests = play(env, tokenizer, tmp_path, lambda _: "yes")
        if error:
            assert error in str(rollout.error)
        else:
            assert rollout.error is None
            assert (requests[0][0]["top_p"], requests[0][0]["max_tokens"]) == (0.5, 2)


def test_a_template_gets_the_agents_arguments(tokenizer, tmp_path):
    with_prefix = copy.deepcopy(tokenizer)
    with_prefix.chat_template = "{{- prefix or '' -}}" + tokenizer.chat_template
    env = load(agent={"sampling": {"chat_template_kwargs": {"prefix": "hello"}}})
    (rollout,), requests = play(env, with_prefix, tmp_path, lambda _: "yes")
    assert rollout.error is None, rollout.error
    assert tokenizer.decode(requests[0][0]["tokens"]).startswith("hello<|user|>")


def test_a_truncation_of_any_turn_counts(tokenizer, tmp_path):
    env = load(id="user_env", harness=None)

    def say(prompt):
        return "x" * 50 if prompt.count("<|user|>") == 1 else "ok"

    (rollout,), _ = play(env, tokenizer, tmp_path, say)
    assert rollout.error is None and rollout.is_truncated and rollout.num_turns == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("taskset", "num_turns"),
    [("tool_tasks", 3), ("stopping_tasks", 2)],
    ids=["turn limit", "stop condition of the task"],
)
def test_an_agent_that_calls_on_and_on_is_ended_without_an_error(
    tokenizer, tmp_path, request, taskset, num_turns
):
    def call_on_and_on(_):
        return {"name": "double", "arguments": '{"x":4}'}

    if taskset == "tool_tasks":  # its agent has max_turns = 3
        (rollout,), requests = request.getfixturevalue("play_with_tools")(call_on_and_on)
    else:
        env, options = load(taskset), {"max_seq_len": 400}
        (rollout,), requests = play(env, tokenizer, tmp_path, call_on_and_on, **options)
    assert rollout.error is None, rollout.error
    assert rollout.num_turns == len(requests) == num_turns
    check_tokens([rollout], requests)


def test_environment_tokens_can_be_trained_too(tokenizer, tmp_path):
    env = load(id="user_env", harness=None)
    (rollout,), requests = play(env, tokenizer, tmp_path, think, mask_env_responses=False)
    record = json.loads(rollout.record)
    assert len(record["messages"]) > 3 and len(record["turns"]) == rollout.num_turns > 1
    (sample,) = rollout.samples
    first_prompt = len(requests[0][0]["tokens"])
    assert not any(sample.loss_mask[:first_prompt]) and all(sample.loss_mask[first_prompt:])
    between = [v == -1 for v in sample.policy_versions[first_prompt:]]
    logprobs = sample.inference_logprobs[first_prompt:]
    assert [p != p for p in logprobs] == between and any(between)


@pytest.mark.slow
def test_tools_are_called_over_mcp_and_their_results_are_not_trained(play_with_tools):
    def say(prompt):
        if "<|tool|>8<|end|>" in prompt:
            return "it is 8"
        return {"name": "double", "arguments": '{"x":4}'}

    (rollout,), requests = play_with_tools(say, max_tokens=90)
    assert rollout.error is None, rollout.error
    assert rollout.metrics["tools_called"] == 1 and rollout.reward == len("it is 8")
    assert requests[0][0]["tools"][0]["function"]["name"] == "double"
    assert len(rollout.samples) == 1
    check_tokens([rollout], requests)


def test_tool_servers_import_a_taskset_that_is_beside_a_script(tokenizer, tmp_path, monkeypatch):
    taskset = load("tool_tasks").taskset
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    args = RLConfig(output_dir=str(tmp_path), env_workers=0)
    make_runner(taskset, "http://unused", tokenizer, args)
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(HERE), "/elsewhere"]


@pytest.mark.slow
def test_tool_servers_that_do_not_answer_are_named(play_with_tools, monkeypatch):
    monkeypatch.setattr("verifiers_rl.envs.tools.CONNECT_S", 0.0)
    (rollout,), _ = play_with_tools(lambda _: "yes")
    assert "the tool servers [''] did not answer within 0 s" in str(rollout.error)


@pytest.mark.slow
def test_an_environment_that_does_not_start_in_time_is_one_error(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("verifiers_rl.envs.v1.LOAD_S", 0.05)
    options = {"generation_timeout": 0.05, "tools_in_process": False}
    with pytest.raises(InvalidEnvironmentError, match="not ready within"):
        play(load("tool_tasks"), tokenizer, tmp_path, lambda _: "yes", **options)


def test_each_trained_agent_is_a_rollout_with_a_baseline_of_its_own(tokenizer, tmp_path):
    words = iter(["a", "bb", "c", "ddd", "eeee", "f"])
    env = load(id="team_env", harness=None)
    rollouts, requests = play(env, tokenizer, tmp_path, lambda _: next(words), num_rollouts=2,
                              max_concurrent=1)  # fmt: skip
    assert [rollout.error for rollout in rollouts] == [None] * 4
    assert sorted({rollout.role for rollout in rollouts}) == ["critic", "writer"]
    said = {"writer": [], "critic": []}
    for rollout in rollouts:
        (sample,) = rollout.samples
        pairs = zip(sample.token_ids, sample.loss_mask, strict=True)
        own = [token for token, is_trained in pairs if is_trained]
        said[rollout.role].append(tokenizer.decode(own, skip_special_tokens=True))
    # "c" and "f" were the judge's, which is not trained.
    assert said == {"writer": ["a", "ddd"], "critic": ["bb", "eeee"]} and len(requests) == 6
    set_advantages(rollouts, of_rewards(center_on_group_mean))
    for role in ("writer", "critic"):
        own = [rollout for rollout in rollouts if rollout.role == role]
        assert sum(rollout.advantage for rollout in own) == pytest.approx(0)
        mean = sum(rollout.reward for rollout in own) / 2
        assert [r.advantage for r in own] == pytest.approx([r.reward - mean for r in own])


def test_a_forfeit_before_the_other_has_a_turn_is_punished(tokenizer, tmp_path):
    said = iter(["fold", "a", "b", "c"])
    group, requests = play(
        load("kuhn_like", harness=None), tokenizer, tmp_path, lambda _: next(said),
        num_rollouts=2, max_concurrent=1,
    )  # fmt: skip
    assert [rollout.error for rollout in group] == [None] * 4
    check_tokens(group, requests)
    first = {rollout.role: rollout for rollout in group if abs(rollout.reward) == 9.0}
    loser, other = first["player0"], first["player1"]
    assert (other.reward, other.num_turns, other.samples) == (9.0, 0, [])
    assert (loser.reward, loser.num_turns) == (-9.0, 1)
    set_advantages(group, of_rewards(center_on_group_mean))
    assert (loser.advantage, other.advantage) == (-5.0, 5.0)
    (sample,) = loser.samples
    assert set(sample.advantages[sample.loss_mask]) == {-5.0}
    same = unpack_group(*pack_group(group))  # as a worker sends it
    assert [len(rollout.samples) for rollout in same] == [len(r.samples) for r in group]
    metrics = batch_metrics([group])
    assert metrics["broken_turn_share"] == 0.0 and metrics["num_turns"] == 1.0


@pytest.mark.parametrize("user", [False, True])
def test_a_reply_that_the_environment_replaced_is_trained_as_it_was_sampled(
    tokenizer, tmp_path, user
):
    """What stands in its place is an observation."""
    said = iter(["so bad", "good", "bad again"])
    env = load("guarded_tasks", harness=None, id="user_env") if user else load("guarded_tasks")
    (rollout,), requests = play(env, tokenizer, tmp_path, lambda _: next(said), max_seq_len=400)
    assert rollout.error is None, rollout.error
    check_tokens([rollout], requests)
    assert rollout.metrics["guarded"] == (-200.0 if user else -100.0)
    assert "I must not say that." in rollout.completion and "bad" not in rollout.completion
    texts = [tokenizer.decode(sample.token_ids) for sample in rollout.samples]
    trained = [tokenizer.decode(s.token_ids[s.loss_mask]) for s in rollout.samples]
    assert any("so bad" in text for text in trained) and not any("must" in text for text in trained)
    if user:
        assert len(requests) == 3 and len(texts) == 3
        assert all("I must not say that." in text for text in texts if "good" in text)
        assert all("so bad" not in text for text in texts if "good" in text)
    else:
        assert len(texts) == 1


def test_a_group_passes_the_filter_if_one_role_does():
    def rollout(role, reward):
        return Rollout(0, "", role=role, reward=reward)

    uniform = [rollout("a", 1.0), rollout("b", 5.0), rollout("a", 1.0), rollout("b", 5.0)]
    assert not GroupFilter(min_reward_variance=0.1).passes(uniform)
    varied = [*uniform[:3], rollout("b", 2.0)]
    assert GroupFilter(min_reward_variance=0.1).passes(varied)


def test_a_sequence_ends_at_max_seq_len(tokenizer, tmp_path):
    env = load(id="user_env", harness=None)
    (rollout,), requests = play(env, tokenizer, tmp_path, lambda _: "x" * 30, max_seq_len=70)
    assert rollout.error is None, rollout.error
    assert rollout.is_truncated
    assert all(len(sample.token_ids) <= 70 for sample in rollout.samples)
    check_tokens([rollout], requests)
    (failed,), _ = play(env, tokenizer, tmp_path, lambda _: "x", max_seq_len=9, max_tokens=5)
    said = "'assistant' got no reply: maximum context length: .* tokens fill max_seq_len=9"
    assert re.search(said, str(failed.error))


def test_overlong_prompts_are_left_out(tokenizer, tmp_path):
    options = RunnerOptions("http://unused", tokenizer, max_seq_len=200, max_prompt_len=14)
    env = load()
    assert V1Environment(env, options).sizes("train") == [3]  # but the one
    with pytest.raises(
        InvalidEnvironmentError, match="it has no tasks; 4 prompts longer than max_prompt_len=5"
    ):
        V1Environment(env, replace(options, max_prompt_len=5))


def test_prompts_that_fill_max_seq_len_are_counted_at_the_start(tokenizer, caplog):
    options = RunnerOptions("http://unused", tokenizer, max_seq_len=15)  # the third one has 24
    assert V1Environment(load(), options).sizes("train") == [3]
    (said,) = caplog.messages
    assert "1 prompts that fill max_seq_len=15 (raise it, or set max_prompt_len) left out" in said
    prompt = "long " * 30
    with pytest.raises(InvalidEnvironmentError, match="no tasks; 4 prompts that fill max_seq_len"):
        V1Environment(load(options={"prompt": prompt}), replace(options, max_seq_len=100))
    # A prompt of few bytes is not rendered: only the first one of its roles is.
    rendered = []

    class Counting(type(tokenizer)):
        def apply_chat_template(self, messages, **options):
            rendered.append(messages)
            return super().apply_chat_template(messages, **options)

    counting = copy.deepcopy(tokenizer)
    counting.__class__ = Counting
    env = V1Environment(
        load(options={"num_tasks": 40}), RunnerOptions("http://unused", counting, 99)
    )
    assert env.sizes("train") == [40] and len(rendered) == 2  # one of them has a system prompt


@pytest.mark.parametrize(
    "refuses",
    [
        "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no system role') }}"
        "{%- endif -%}",
        "{%- if messages[0]['role'] == 'system' -%}{{ 'no system role' + none }}{%- endif -%}",
    ],
)
def test_a_prompt_that_the_template_refuses_is_told_before_any_rollout(tokenizer, refuses):
    gemma = copy.deepcopy(tokenizer)
    gemma.chat_template = refuses + gemma.chat_template
    options = RunnerOptions("http://unused", gemma, 200)
    said = r"environment 'env': task 2: the model's chat template refuses its prompt, of the roles "
    with pytest.raises(InvalidEnvironmentError, match=said + "system, user: "):
        V1Environment(load(), options)
    assert V1Environment(load(options={"num_tasks": 2}), options).sizes("train") == [2]
    # Here a simulated user opens, so the template never gets the system prompt alone.
    alone = [{"role": "system", "content": "be brief"}]
    assert not V1Environment(load(options={"num_tasks": 2}), options).renderer.is_longer(alone, 99)


def test_evaluation_has_its_own_taskset(tokenizer, tmp_path):
    env = load(eval_taskset={"num_tasks": 2})
    args = RLConfig(output_dir=str(tmp_path), env_workers=0)
    runner = only_runner(make_runner(env, "http://unused", tokenizer, args))
    assert (runner.sizes("train"), runner.sizes("eval")) == ([4], [2])


def test_a_taskset_alone_and_a_mix_of_both_kinds(tokenizer, tmp_path):
    taskset = first(3, load(harness=None).taskset)
    args = RLConfig(output_dir=str(tmp_path), env_workers=0)
    runner = only_runner(make_runner(taskset, "http://unused", tokenizer, args))
    assert runner.sizes("train") == [3]
    assert runner.env.config.agent.harness.id == "verifiers_rl"
    (rollout,), _ = play(taskset, tokenizer, tmp_path, lambda _: "yes")
    assert rollout.error is None and rollout.reward == 3
    other = make_env({"a": "b", "c": "d"}, lambda *_: 1.0)  # a classic one where there are some
    mix = [WeightedEnv(taskset, "new"), WeightedEnv(other, "other")]
    assert make_runner(mix, "http://unused", tokenizer, args).sizes("train") == [3, 2]
    assert make_runner("small_tasks", "http://unused", tokenizer, args).sizes("train") == [4]
    with pytest.raises(InvalidEnvironmentError, match="taskset 'no_such_tasks' not found"):
        make_runner("no_such_tasks", "http://unused", tokenizer, args)


def test_an_option_of_classic_environments_is_refused(tokenizer, tmp_path):
    args = RLConfig(output_dir=str(tmp_path), client_type="renderer")
    with pytest.raises(InvalidEnvironmentError, match="leave client_type out"):
        make_runner(load(), "http://unused", tokenizer, args)


def test_branches_share_their_tokens_and_train_them_once():
    class Trace:
        def __init__(self, nodes):
            self.nodes = nodes

        @property
        def branches(self):
            common, one, other = self.nodes
            return [
                vf.Branch(index=0, nodes=[common, one]),
                vf.Branch(index=1, nodes=[common, other]),
            ]

    def node(prompt, sampled, logprob, versions=None):
        return vf.MessageNode.model_construct(
            message=AssistantMessage(content="x", policy_versions=versions), sampled=True,
            mask=np.array([False] * len(prompt) + [True] * len(sampled)),
            token_ids=prompt + sampled, logprobs=[logprob] * len(sampled),
        )  # fmt: skip

    said = node([1], [2, 3], -0.1, [(0, 4), (1, 5)])
    trace = Trace([said, node([4], [5], -0.2), node([6], [7], -0.3)])
    expected = [
        Sample(
            [1, 2, 3, 4, 5],
            [False, True, True, False, True],
            [0.0, -0.1, -0.1, 0.0, -0.2],
            [-1, 4, 5, -1, 9],
        ),
        Sample(
            [1, 2, 3, 6, 7],
            [False, False, False, False, True],
            [0.0, -0.1, -0.1, 0.0, -0.3],
            [-1, -1, -1, -1, 9],
        ),
    ]
    samples = samples_from_trace(trace, 9)
    assert [*map(values_of, samples)] == [*map(values_of, expected)]
    both, (first, second) = Trace.branches, trace.branches
    second.trainable = False  # an attempt at a compaction
    Trace.branches = [first, second]
    assert len(samples_from_trace(trace, 9)) == 1
    Trace.branches = both
    trace.nodes[2].logprobs = [math.nan]
    with pytest.raises(ValueError, match="logprob of a sampled token is NaN or infinite"):
        samples_from_trace(trace, 9)
    trace.nodes[2].logprobs = []
    with pytest.raises(ValueError, match="1 sampled tokens but 0 logprobs"):
        samples_from_trace(trace, 9)
    trace.nodes[1].mask = [False, False]
    with pytest.raises(ValueError, match="0 sampled tokens but 1 logprobs"):
        samples_from_trace(trace, 9)
    assert os.environ["PYTHONPATH"] == str(HERE)


def test_an_environments_own_timeout_is_not_taken_for_generation_timeout(tokenizer, tmp_path):
    env = load()

    async def late(slot, context):
        raise TimeoutError("the database did not answer")

    args = RLConfig(output_dir=str(tmp_path), env_workers=0)
    runner = only_runner(make_runner(env, "http://unused", tokenizer, args))
    runner.env.run_slot = late
    for outcome, said in ((late, "the database did not answer"), (asyncio.sleep, "0.05 s")):
        runner.env.run_slot = outcome if outcome is late else lambda *_: asyncio.sleep(9)
        request = make_request(sampling_args={"temperature": 1.0}, timeout_s=0.05)
        (rollout,) = asyncio.run(runner.run_group(request))
        assert isinstance(rollout.error, TimeoutError) and said in str(rollout.error)
        assert ("generation_timeout" in str(rollout.error)) == (said == "0.05 s")


def test_an_image_in_a_prompt_is_refused_at_the_start(tokenizer, tmp_path):
    from small_tasks import SmallConfig, SmallTask, SmallTaskset

    parts = [{"type": "text", "text": "what is it?"}]
    parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}})

    class Pictures(SmallTaskset):
        def load(self):
            yield SmallTask(vf.TaskData(idx=0, prompt=[{"role": "user", "content": parts}]))

    args = RLConfig(output_dir=str(tmp_path), env_workers=0)
    with pytest.raises(InvalidEnvironmentError, match=r"task 0: .*'image_url': images .* trained"):
        make_runner(Pictures(SmallConfig()), "http://unused", tokenizer, args)
    env = load(id="user_env", harness=None)
    env.question = parts[1:]
    (rollout,), requests = play(env, tokenizer, tmp_path, lambda _: "yes")
    assert "images and other media are not trained yet" in str(rollout.error)
    assert len(requests) == 1


SECRETS = {"VERIFIERS_RL_TOKEN": "s1", "HF_TOKEN": "s2", "AWS_SECRET_ACCESS_KEY": "s3"}
SECRETS |= {"WANDB_API_KEY": "s4", "DB_PASSWORD": "s5", "GITHUB_TOKEN": "s6", "KAGGLE_KEY": "s7"}
SECRETS |= {"PGPASSWORD": "s8", "MYSQL_PWD": "s9", "GITHUB_PAT": "s10", "REDIS_AUTH": "s11"}
SECRETS |= {"HF_TOKENS": "s12", "DATABASE_URL": "postgres://me:s13@db/1"}


@pytest.mark.slow
def test_programs_and_tool_servers_do_not_get_the_trainers_secrets(
    tokenizer, tmp_path, monkeypatch
):
    for name, value in {**SECRETS, "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "de"}.items():
        monkeypatch.setenv(name, value)

    def say(prompt):
        return "done" if "<|tool|>" in prompt else {"name": "environment", "arguments": "{}"}

    options = {"out": str(tmp_path / "seen")}
    env = load("prying_tasks", agent={"runtime": {"type": "subprocess"}}, options=options)
    options = {"max_tokens": 60, "max_seq_len": 8000, "tools_in_process": False}
    (rollout,), _ = play(env, tokenizer, tmp_path, say, **options)
    assert rollout.error is None, rollout.error
    of_tool = rollout.completion.split("tool: ")[1].splitlines()[0].split()
    of_program = Path(env.taskset.config.out).read_text().split()
    for seen in (of_tool, of_program):
        assert {"PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD"} <= {*seen}
        assert not SECRETS.keys() & {*seen}
    # What a task passes on explicitly is its own affair.
    assert "GRADER_TOKEN" in of_program
    assert os.environ["VERIFIERS_RL_TOKEN"] == "s1"


def test_more_rollouts_run_at_once_than_the_soft_limit_of_open_files_lets(tokenizer, tmp_path):
    num_rollouts, files = 96, resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(files)
    resource.setrlimit(files, (len(os.listdir("/dev/fd")) + 100, hard))
    try:
        limit = {"max_concurrent": num_rollouts}
        rollouts, requests = play(
            load(), tokenizer, tmp_path, lambda _: "yes", num_rollouts=num_rollouts, **limit
        )
    finally:
        resource.setrlimit(files, (soft, hard))
    assert not [rollout.error for rollout in rollouts if rollout.error]
    assert len(requests) == num_rollouts


@pytest.mark.parametrize("split", ["train", "eval"])
def test_sampling_of_evaluations_is_that_of_the_run_over_that_of_the_environment(
    tokenizer, tmp_path, split
):
    evaluated = {"temperature": 0.0, "max_tokens": 7, "top_k": 5}
    options = {"eval_sampling": evaluated, "split": split}
    trained = {"temperature": 0.7, "max_tokens": 40, "top_k": -1}

    def asked(env):
        (rollout,), requests = play(env, tokenizer, tmp_path, lambda _: "yes", **options)
        assert rollout.error is None, rollout.error
        return {name: requests[0][0][name] for name in trained} | {"top_p": requests[0][0]["top_p"]}

    expected = {**(evaluated if split == "eval" else trained), "top_p": 1.0}
    assert asked(load()) == expected
    own = WeightedEnv(load(), "env", sampling_args={"max_tokens": 30, "top_p": 0.5})
    own_wins = {"top_p": 0.5} | ({} if split == "eval" else {"max_tokens": 30})
    assert asked([own]) == expected | own_wins
    # What an agent has of its own stays, and is no error where nothing is trained.
    agent = {"sampling": {"temperature": 0.7, "max_tokens": 2}}
    assert asked(load(agent=agent)) == expected | {"temperature": 0.7, "max_tokens": 2}


def test_the_text_of_a_tool_call_has_its_name_however_it_is_written():
    called = {"name": "add", "arguments": '{"a": 1}'}
    for call in (called, {"type": "function", "id": "1", "function": called}):
        message = {"role": "assistant", "content": "so", "tool_calls": [call]}
        assert text_of([message]) == 'so [add({"a": 1})]'
