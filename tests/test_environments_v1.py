"""Environments of verifiers.v1, against a stand-in for vf-vllm that answers over HTTP."""

import asyncio
import copy
import json
import os
import resource
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import verifiers.v1 as vf
from aiohttp import web

from tests.helpers import chat, in_base64, make_request, make_tokenizer, values_of
from tests.serving import chat_reply, serving
from verifiers_rl import RLConfig, WeightedEnv, env_from
from verifiers_rl.advantages import center_on_group_mean, of_rewards, set_advantages
from verifiers_rl.config import GroupFilter
from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    RunnerOptions,
    Turn,
    samples_from_turns,
)
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.v1 import V1Environment, turns_of_trace
from verifiers_rl.envs.v1_client import Said
from verifiers_rl.envs.v1_loading import load_v1_environment
from verifiers_rl.inference import ChatReply, ServerLostError
from verifiers_rl.inference.packed_tokens import pack_sampled, unpack_numbers
from verifiers_rl.report.means import batch_metrics
from verifiers_rl.requests import Places
from verifiers_rl.types import Rollout, Sample

HERE = Path(__file__).parent / "v1"
NULL = {"id": "null"}
CALL = {"name": "double", "arguments": '{"x":4}'}


@pytest.fixture(scope="module")
def tokenizer():
    """Drops the thinking of past turns and writes some for the last, as Qwen3's template does."""
    tokenizer = make_tokenizer("<|tool|>", "<tool_call>")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- message['content'] or '' -}}",
        "{%- if loop.last -%}{{- '<think></think>' + (message['content'] or '') -}}"
        "{%- else -%}{{- (message['content'] or '').split('</think>')[-1] -}}{%- endif -%}",
    )
    return tokenizer


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def load(taskset="small_tasks", harness=NULL, **table):
    table = {"taskset": {"id": taskset} | table.pop("options", {})} | table
    if harness:
        table["agent"] = {**table.get("agent", {}), "harness": harness}
    return load_v1_environment(table)


def with_user():
    return load(harness=None, id="user_env")


@pytest.fixture
def add_to_task(monkeypatch):
    """Gives the task of small_tasks.py one more method."""
    from small_tasks import SmallTask

    return lambda method: monkeypatch.setattr(SmallTask, method.__name__, method, raising=False)


class Server:
    """Answers with what `say` returns for the prompt's text: text, or a tool call as a dict."""

    def __init__(self, tokenizer, say):
        self.tokenizer, self.say = tokenizer, say
        self.requests = []  # each with the tokens of its reply

    async def answer(self, request):
        body = await request.json()
        body["tokens"] = unpack_numbers(body["tokens"]).tolist()
        text, finish, calls = self.say(self.tokenizer.decode(body["tokens"])), "stop", []
        version = len(self.requests)
        if not isinstance(text, str):
            calls = [{"id": f"call-{version}", "type": "function", "function": text}]
            text, finish = f"<tool_call>{json.dumps(text)}", "tool_calls"
        tokens = [*self.tokenizer(text, add_special_tokens=False).input_ids]
        if len(tokens) >= body["max_tokens"]:
            tokens, finish = tokens[: body["max_tokens"]], "length"
            text = self.tokenizer.decode(tokens)
        else:
            tokens.append(self.tokenizer.eos_token_id)
        self.requests.append((body, tokens))
        mask = None
        if body.get("sampling_mask"):  # each token and the one after it; any, for even ones
            counts = np.array([2 * (t % 2) for t in tokens])
            mask = counts, np.array([[t, t + 1] for t in tokens if t % 2]).reshape(-1)
        num_rows = len(body["tokens"]) + len(tokens) - 1
        experts = in_base64(np.full((num_rows, 1, 2), version, np.uint8))
        of_message = {"refusal": None, "tool_calls": calls}
        reply = chat_reply(
            None if calls else text, finish, of_message, logprobs={"content": []},
            routed_experts=experts,
        )  # fmt: skip
        packed = pack_sampled(tokens, np.array([-0.1 * (t % 7) for t in tokens]), mask)
        reply |= {"model": body["model"], "usage": None, "packed_tokens": packed}
        return web.json_response(reply, headers={"versions": f"0:{version}"})


@asynccontextmanager
async def running(env, server, tokenizer, args):
    """The runner of an environment whose model calls a stand-in answers."""
    async with serving(server.answer, "/v1/chat/completions/tokens") as url:
        runner = make_runner(env, url, tokenizer, args)
        try:
            await runner.open()
            yield runner
        finally:
            await runner.close()


@pytest.fixture
def play(tokenizer, tmp_path):
    """Plays one group: its rollouts, and the requests that it made. Each token that was sampled is
    to be trained, or, where it `fails`, each rollout to have an error.
    """

    def play(
        say="yes", env=None, index=0, num_rollouts=1, split="train", fails=False, trains_all=True,
        with_tokenizer=tokenizer, **options,
    ):  # fmt: skip
        options = {"max_seq_len": 8000, "max_tokens": 200, **options}
        args = RLConfig(output_dir=tmp_path, use_cpu=True, env_workers=0, **options)
        server = Server(with_tokenizer, say if callable(say) else lambda prompt: say)

        async def run():
            async with running(env or load(), server, with_tokenizer, args) as runner:
                return await runner.run_group(request)

        sampling = args.sampling_args() if split == "train" else args.eval_sampling_args()
        places = Places(options.get("max_concurrent", 4))
        timeout_s = args.generation_timeout
        request = make_request(
            index, num_rollouts, split, sampling_args=sampling, places=places, timeout_s=timeout_s
        )
        group = asyncio.run(run())
        for rollout in group:
            assert (rollout.error is not None) == fails, rollout.error
            assert rollout.error is None or not rollout.samples
        if trains_all and not fails:
            check_tokens(group, server.requests)
        return group, server.requests

    return play


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
    assert trained == expected
    for rollout in rollouts:
        for sample in rollout.samples:
            assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.policy_versions)


# --- One agent ------------------------------------------------------------------------------------


def test_a_taskset_is_played_by_one_agent(play, tokenizer):
    rollouts, requests = play(index=2, num_rollouts=2)
    for rollout in rollouts:
        assert (rollout.reward, rollout.prompt, rollout.completion) == (3.0, "question 2", "yes")
        assert rollout.metrics == {"length": 3.0, "tools_called": 0.0}
        assert rollout.num_turns == 1 and not rollout.is_truncated and rollout.generation_s > 0
    body, _ = requests[0]
    text = "<|system|>be brief<|end|><|user|>question 2<|end|><|assistant|>"
    assert tokenizer.decode(body["tokens"]) == text


def test_advantages_that_a_trace_carries_are_those_of_its_tokens(play, add_to_task):
    @add_to_task
    @vf.reward
    async def grade(self, trace: vf.Trace) -> float:
        trace.nodes[-1].advantages = [0.5 + at for at in range(len(trace.nodes[-1].logprobs))]
        return 1.0

    (rollout,), ((_, sampled),) = play()
    (sample,) = rollout.samples
    given = [0.5 + at for at in range(len(sampled))]
    assert rollout.has_own_advantages and sample.advantages[sample.loss_mask].tolist() == given
    assert rollout.advantage == pytest.approx(sum(given) / len(sampled))


def test_the_record_of_a_rollout_has_its_turns_tool_calls_and_times(play):
    env = load("tool_tasks", agent={"max_turns": 3})
    (rollout,), requests = play(lambda p: "it is 8" if "<|tool|>8<|end|>" in p else CALL, env)
    assert '[double({"x":4})]' in rollout.completion
    record = json.loads(rollout.record)
    turns, messages = record["turns"], record["messages"]
    _, call, result, said = messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    (made,) = call["tool_calls"]
    assert (made["function"], made["id"]) == (CALL, result["tool_call_id"])
    assert (result["content"], said["content"]) == ("8", "it is 8")
    assert [messages[turn["message"]] for turn in turns] == [call, said]
    assert abs(time.time() - record["begun_at"]) < 60
    times = [turn[name] for turn in turns for name in ("begin_s", "end_s")]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 60
    counts = [(turn["num_prompt_tokens"], turn["num_sampled_tokens"]) for turn in turns]
    assert counts == [(len(body["tokens"]), len(tokens)) for body, tokens in requests]
    assert [turn["policy_version"] for turn in turns] == [0, 1]
    assert [turn["finish_reason"] for turn in turns] == ["tool_calls", "stop"]


def test_an_error_costs_its_episode_whose_record_has_what_was_said(play):
    (rollout,), _ = play(index=3, fails=True)
    assert "no answer key" in str(rollout.error)
    assert "small_tasks.py" in rollout.error.__notes__[0]
    messages = json.loads(rollout.record)["messages"]
    assert [message["content"] for message in messages] == ["question 3", "yes"]

    def refuse(prompt):
        raise web.HTTPBadRequest(text="no such model")

    (rollout,), _ = play(refuse, fails=True)
    assert str(rollout.error) == "ProviderError: Error code: 400 - no such model"


def test_a_timeout_of_the_environment_is_not_taken_for_generation_timeout(play, monkeypatch):
    async def late(slot, context):
        raise TimeoutError("the database did not answer")

    raises, waits = load(), load(agent={"timeout": {"rollout": 0.3}})
    monkeypatch.setattr(raises, "run_slot", late)
    monkeypatch.setattr(
        "verifiers_rl.inference.ServerClient.reply_to", lambda *args, **kwargs: asyncio.sleep(10)
    )
    for env, said in ((raises, "the database did not answer"), (waits, "ran out of its own time")):
        (rollout,), _ = play(env=env, fails=True)
        assert said in str(rollout.error) and "generation_timeout" not in str(rollout.error)


def test_an_environment_that_does_not_start_in_time_is_one_error(play, monkeypatch):
    import many_tools

    monkeypatch.setattr("verifiers_rl.envs.v1.LOAD_S", 0.05)
    monkeypatch.setattr(many_tools.Pad, "setup", lambda self: asyncio.sleep(0.5))
    with pytest.raises(InvalidEnvironmentError, match="not ready within"):
        play(env=load("many_tools"), generation_timeout=0.05)


def test_tool_servers_import_a_taskset_that_is_beside_a_script(tokenizer, monkeypatch):
    taskset = load("tool_tasks").taskset
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    V1Environment(taskset, RunnerOptions("http://unused", tokenizer, 200))
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(HERE), "/elsewhere"]


# --- Several turns --------------------------------------------------------------------------------


def think(prompt):
    return f"<think>hm</think>{prompt.count('<|user|>')}"


def test_turns_with_a_user_are_one_sample_though_the_template_drops_thinking(play, tokenizer):
    """Allowed tokens and experts are those of the turn that computed a token."""
    (rollout,), requests = play(think, with_user(), top_k=9, router_replay=True, sampling_mask=True)
    (sample,) = rollout.samples
    assert tokenizer.decode(sample.token_ids) == (
        "<|user|>question 0<|end|><|assistant|><think>hm</think>1<|end|>"
        "<|user|>and? 18<|end|><|assistant|><think>hm</think>2<|end|>"
        "<|user|>more? 18<|end|><|assistant|><think>hm</think>3<|end|>"
    )
    is_odd = sample.loss_mask & (sample.token_ids % 2 == 1)
    allowed = np.where(is_odd[:, None], sample.token_ids[:, None] + [0, 1], -1)
    assert sample.extras["allowed_tokens"].tolist() == allowed.tolist()
    # A turn returns the experts of all tokens but its last one.
    ends = [0, *(len(body["tokens"]) + len(tokens) - 1 for body, tokens in requests)]
    turns = [*np.repeat([0, 1, 2], np.diff(ends)), -1]
    assert sample.extras["routed_experts"].tolist() == [[[turn, turn]] for turn in turns]


@pytest.mark.parametrize("text, num_samples", [("x?yx?", 1), ("<think>hm", 1), ("</think>", 3)])
def test_after_a_cut_reply_the_prompt_is_rendered_anew(play, tokenizer, text, num_samples):
    """The template then ends the reply, or rewrites it, which starts a sample."""
    limit = len(tokenizer(text, add_special_tokens=False).input_ids)
    (rollout,), requests = play(text, with_user(), max_tokens=limit)
    assert rollout.is_truncated and rollout.num_turns == 3
    assert len(rollout.samples) == num_samples
    kept = text.split("</think>")[-1]
    second = f"<|user|>question 0<|end|><|assistant|>{kept}<|end|><|user|>and? {limit}<|end|>"
    assert tokenizer.decode(requests[1][0]["tokens"]) == f"{second}<|assistant|>"


def test_a_truncation_of_any_turn_counts_and_an_end_by_max_turns_does_not(play):
    (rollout,), _ = play(lambda p: "ok" if "and?" in p else "x" * 50, with_user(), max_tokens=40)
    assert rollout.is_truncated and rollout.num_turns == 3
    (rollout,), _ = play(CALL, load("tool_tasks", agent={"max_turns": 3}))
    assert not rollout.is_truncated and rollout.num_turns == 3


def test_environment_tokens_can_be_trained_too(play):
    (rollout,), requests = play(think, with_user(), mask_env_responses=False, trains_all=False)
    (sample,) = rollout.samples
    first_prompt = len(requests[0][0]["tokens"])
    assert not any(sample.loss_mask[:first_prompt]) and all(sample.loss_mask[first_prompt:])
    assert any(sample.policy_versions[first_prompt:] == -1)


def test_a_reply_that_the_environment_replaced_is_trained_as_it_was_sampled(
    play, tokenizer, add_to_task
):
    """What stands in its place is an observation."""

    @add_to_task
    @vf.intercept
    async def guard(self, response: vf.Response) -> vf.Response | None:
        if "bad" not in (response.message.content or ""):
            return None
        refusal = vf.AssistantMessage(content="I must not say that.")
        return response.model_copy(update={"message": refusal})

    @add_to_task
    @vf.reward
    async def guarded(self, trace: vf.Trace) -> float:
        return -100.0 * len(trace.response_rewrites)

    said = iter(["so bad", "good", "bad again"])
    (rollout,), _ = play(lambda _: next(said), with_user())
    assert rollout.metrics["guarded"] == -200.0
    assert "I must not say that." in rollout.completion and "bad" not in rollout.completion
    trained = [tokenizer.decode(s.token_ids[s.loss_mask]) for s in rollout.samples]
    assert trained == ["so bad<|end|>", "good<|end|>bad again<|end|>"]
    text = tokenizer.decode(rollout.samples[1].token_ids)
    assert "I must not say that." in text and "so bad" not in text


def test_a_sequence_ends_at_max_seq_len(play):
    (rollout,), _ = play("x" * 30, with_user(), max_seq_len=70, max_tokens=40)
    assert rollout.is_truncated
    assert all(len(sample.token_ids) <= 70 for sample in rollout.samples)


# --- Several agents -------------------------------------------------------------------------------


def test_a_forfeit_before_the_other_has_a_turn_is_punished(play):
    """Each role has a baseline of its own."""
    said = iter(["fold", "a", "b", "c"])
    env = load("kuhn_like", harness=None)
    group, _ = play(lambda _: next(said), env, num_rollouts=2, max_concurrent=1)
    first = {rollout.role: rollout for rollout in group if abs(rollout.reward) == 9.0}
    loser, other = first["player0"], first["player1"]
    assert (other.reward, other.num_turns, other.samples) == (9.0, 0, [])
    assert (loser.reward, loser.num_turns) == (-9.0, 1)
    set_advantages(group, of_rewards(center_on_group_mean))
    assert (loser.advantage, other.advantage) == (-5.0, 5.0)
    (sample,) = loser.samples
    assert set(sample.advantages[sample.loss_mask]) == {-5.0}
    metrics = batch_metrics([group], 2)
    assert metrics["broken_turn_share"] == 0.0 and metrics["num_turns"] == 1.0


@pytest.mark.parametrize("other_reward, passes", [(5.0, False), (2.0, True)])
def test_a_group_passes_the_filter_if_one_role_does(other_reward, passes):
    rewards = (("a", 1.0), ("b", 5.0), ("a", 1.0), ("b", other_reward))
    group = [Rollout(0, "", role=role, reward=reward) for role, reward in rewards]
    assert GroupFilter(min_reward_variance=0.1).passes(group) == passes


def test_branches_share_their_tokens_and_train_them_once():
    def turn(prompt, sampled, logprob, versions=None):
        arrays = np.array(sampled), np.full(len(sampled), logprob)
        reply = ChatReply({}, versions, arrays, None, None)
        return Said(SimpleNamespace(prompt=[None]), object(), Turn(prompt, reply))

    said = [
        turn([1], [2, 3], -0.1, [(0, 4), (1, 5)]),
        turn([1, 2, 3, 4], [5], -0.2),
        turn([1, 2, 3, 6], [7], -0.3),
        turn([1, 2, 3, 4, 5], [8], -0.4),
    ]
    nodes = [vf.MessageNode.model_construct(message=one.message) for one in said]
    paths = nodes[:2] + nodes[3:], [nodes[0], nodes[2]]
    branches = [vf.Branch.model_construct(nodes=path) for path in paths]
    trace = SimpleNamespace(nodes=nodes, branches=branches)
    first, second = samples_from_turns(turns_of_trace(trace, said), 9)
    logprobs = [0.0, -0.1, -0.1, 0.0, -0.2, -0.4]
    in_loss = [False, True, True, False, True, True]
    expected = Sample([1, 2, 3, 4, 5, 8], in_loss, logprobs, [-1, 4, 5, -1, 9, 9])
    assert values_of(first) == values_of(expected)
    assert second.token_ids.tolist() == [1, 2, 3, 6, 7]
    assert second.loss_mask.tolist() == [False] * 4 + [True]
    assert second.policy_versions.tolist() == [-1] * 4 + [9]
    branches[1].trainable = False  # an attempt at a compaction
    assert len(samples_from_turns(turns_of_trace(trace, said), 9)) == 1


# --- What is asked of the server ------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "eval"])
def test_sampling_of_evaluations_is_that_of_the_run_over_that_of_the_environment(play, split):
    evaluated = {"temperature": 0.0, "max_tokens": 7, "top_k": 5}
    trained = {"temperature": 0.7, "max_tokens": 200, "top_k": -1}
    expected = {**(evaluated if split == "eval" else trained), "top_p": 1.0}
    own = WeightedEnv(load(), "env", sampling_args={"max_tokens": 30, "top_p": 0.5})
    own_wins = {"top_p": 0.5} | ({} if split == "eval" else {"max_tokens": 30})
    # What an agent has of its own stays, and is no error where nothing is trained.
    agent = {"temperature": 0.7, "max_tokens": 2, "top_p": 0.5}
    of_agent = load(agent={"sampling": agent})
    for env, wins in ((load(), {}), ([own], own_wins), (of_agent, agent)):
        _, ((body, _),) = play(env=env, split=split, eval_sampling=evaluated)
        assert body | expected | wins == body


def test_an_agent_that_is_trained_samples_at_the_trainers_temperature(play):
    (rollout,), _ = play(env=load(agent={"sampling": {"temperature": 0.2}}), fails=True)
    assert "'agent' samples at temperature=0.2, and the trainer" in str(rollout.error)


def test_the_least_length_of_an_agents_reply_is_not_above_the_room_that_is_left(play):
    _, ((body, _),) = play(env=load(agent={"sampling": {"min_tokens": 9, "max_tokens": 5}}))
    assert (body["min_tokens"], body["max_tokens"]) == (5, 5)


HI, HELLO = ({"chat_template_kwargs": {"greeting": word}} for word in ("hi", "hello"))


@pytest.mark.parametrize(
    "of_run, of_agent, beginning",
    [
        ({}, HELLO, "hello"),
        (HI, {}, "hi"),
        (HI, HELLO, "hello"),
        # As from vLLM.
        ({}, {"reasoning_effort": "none"}, "none False"),
        ({}, {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 0}}, "low 0"),
    ],
)
def test_a_template_gets_the_arguments_of_the_run_and_of_the_agent(
    play, tokenizer, of_run, of_agent, beginning
):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{{- greeting }}{{ reasoning_effort }}{{ ' ' ~ enable_thinking if reasoning_effort }}"
    ) + tokenizer.chat_template
    play = partial(play, with_tokenizer=tokenizer, **of_run)
    envs = [load(agent={"sampling": of_agent})]
    envs += [] if of_agent else [env_from(["q"], lambda completion: 1.0)]
    for env in envs:
        _, ((body, _),) = play(env=env)
        assert tokenizer.decode(body["tokens"]).startswith(f"{beginning}<|user|>")
    if of_agent == HELLO:  # with which a prompt that had room at the start has none
        (failed,), _ = play(env=envs[0], fails=True, max_seq_len=16, max_tokens=5)
        assert "max_seq_len=16" in str(failed.error)


def test_a_seed_of_an_agent_does_not_make_the_rollouts_of_a_group_alike(play):
    _, requests = play(env=load(agent={"sampling": {"seed": 4}}), num_rollouts=2)
    assert not any("seed" in body for body, _ in requests)


def test_rollouts_of_a_group_end_with_one_that_finds_no_server():
    ended = []

    async def play_one(number, play):
        if number:
            raise ServerLostError("no server")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    async def play_all():
        group = SimpleNamespace(num_rollouts=2, play=play_one)
        with pytest.raises(ServerLostError):
            await V1Environment.run_task(SimpleNamespace(_play=print), None, group)
        return [*ended]

    assert asyncio.run(play_all()) == [0]


def test_sampling_that_biases_logprobs_is_warned_of_once(play, caplog):
    options = {"top_p": 0.5, "top_k": 5, "max_tokens": 2, "extra_body": {"min_p": 0.1}}
    env = load(id="team_env", harness=None, writer={"sampling": options})
    play(env=env, num_rollouts=3, top_p=0.9, trains_all=False)
    for option in ("min_p=0.1", "top_k=5", "top_p=0.5"):
        assert caplog.text.count(f"the agent 'writer' samples with {option}") == 1
    assert caplog.text.count("the agent") == 3


# --- Tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, limit", [("max_prompt_len", 14), ("max_seq_len", 15)])
def test_overlong_prompts_are_left_out_and_counted(tokenizer, caplog, name, limit):
    """One of four tasks has a system prompt, and so 24 tokens."""
    options = RunnerOptions("http://unused", tokenizer, 200)
    assert V1Environment(load(), replace(options, **{name: limit})).sizes("train") == [3]
    assert "1 prompts" in caplog.messages[0] and f"{name}={limit}" in caplog.messages[0]
    with pytest.raises(InvalidEnvironmentError, match="it has no tasks; 4 prompts "):
        V1Environment(load(), replace(options, **{name: 5}))


@pytest.mark.parametrize(
    "refusal", ["raise_exception('no system role')", "'no system' + none", "1 / 0"]
)
def test_a_prompt_that_the_template_refuses_is_told_before_any_rollout(tokenizer, refusal):
    gemma = copy.deepcopy(tokenizer)
    gemma.chat_template = (
        "{%- if messages[0]['role'] == 'system' -%}{{ " + refusal + " }}{%- endif -%}"
    ) + gemma.chat_template
    options = RunnerOptions("http://unused", gemma, 200)
    said = "environment 'env': task 2: .*chat template refuses its prompt, .* system, user: "
    with pytest.raises(InvalidEnvironmentError, match=said):
        V1Environment(load(), options)
    assert V1Environment(load(options={"num_tasks": 2}), options).sizes("train") == [2]


def test_an_image_is_refused_in_a_prompt_at_the_start_and_in_a_turn_in_its_rollout(
    play, tokenizer, monkeypatch
):
    from small_tasks import SmallTask, SmallTaskset

    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
    env = with_user()
    env.question = image
    (rollout,), _ = play(env=env, fails=True)
    assert "images and other media are not trained yet" in str(rollout.error)
    task = SmallTask(vf.TaskData(idx=0, prompt=chat(image)))
    monkeypatch.setattr(SmallTaskset, "load", lambda self: [task])
    with pytest.raises(InvalidEnvironmentError, match=r"task 0: .*'image_url': images .* trained"):
        V1Environment(load(), RunnerOptions("", tokenizer, 200))


# --- Processes ------------------------------------------------------------------------------------

SECRETS = dict.fromkeys(
    (
        "VERIFIERS_RL_TOKEN", "HF_TOKEN", "HF_TOKENS", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY",
        "DB_PASSWORD", "GITHUB_TOKEN", "GITHUB_PAT", "KAGGLE_KEY", "PGPASSWORD", "MYSQL_PWD",
        "REDIS_AUTH",
    ),
    "secret",
)  # fmt: skip
SECRETS["DATABASE_URL"] = "postgres://me:secret@db/1"


@pytest.mark.slow
def test_programs_and_tool_servers_do_not_get_the_trainers_secrets(play, monkeypatch, add_to_task):
    for name, value in {**SECRETS, "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "de"}.items():
        monkeypatch.setenv(name, value)
    of_program = []

    @add_to_task
    def runtime_env(self):
        return {"GRADER_TOKEN": "given"}

    @add_to_task
    @vf.reward
    async def pry(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        done = await runtime.run(["python3", "-c", "import os; print(*os.environ)"], {})
        of_program.extend(done.stdout.split())
        return 1.0

    call = {"name": "variables", "arguments": "{}"}
    env = load("tool_tasks", agent={"runtime": {"type": "subprocess"}})
    monkeypatch.setattr("verifiers_rl.envs.tools.runs_here", lambda _: False)
    (rollout,), _ = play(lambda p: "done" if "<|tool|>" in p else call, env)
    of_tool = rollout.completion.split("tool: ")[1].splitlines()[0].split()
    for seen in (of_tool, of_program):
        assert {"PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD"} <= {*seen}
        assert not SECRETS.keys() & {*seen}
    # What a task passes on explicitly is its own affair.
    assert "GRADER_TOKEN" in of_program
    assert os.environ["VERIFIERS_RL_TOKEN"] == "secret"


def test_more_rollouts_run_at_once_than_the_soft_limit_of_open_files_lets(play):
    num_rollouts, files = 96, resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(files)
    resource.setrlimit(files, (len(os.listdir("/dev/fd")) + 100, hard))
    try:
        _, requests = play(num_rollouts=num_rollouts, max_concurrent=num_rollouts)
    finally:
        resource.setrlimit(files, (soft, hard))
    assert len(requests) == num_rollouts


def test_an_empty_reply_is_trained_on(play, tokenizer):
    (rollout,), requests = play("", with_user())
    assert rollout.num_turns == 3 and len(rollout.samples) == 1
    assert [tokens for _, tokens in requests] == [[tokenizer.eos_token_id]] * 3
