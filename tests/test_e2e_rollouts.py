"""Rollouts of several turns on the real vLLM server: each token that was sampled is trained, once,
after exactly the tokens that it was sampled after.
"""

import asyncio
import json
import os
from collections import Counter

import httpx
import numpy as np
import pytest
import torch
from transformers import set_seed

from tests.helpers import ROOT, chat, load_example, make_request, make_tokenizer, write_model
from tests.test_agents import in_any_order, len_of
from verifiers_rl import RLConfig, RLTrainer, WeightedEnv, env_from_agent
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.envs.agents import load_agent_environment
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.v1_loading import load_v1_environment
from verifiers_rl.inference import RolloutSession, ServerClient
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient
from verifiers_rl.inference.packed_tokens import pack_numbers

pytestmark = pytest.mark.e2e

# The template would render this call with a space after each colon and comma.
CALL = '<tool_call>{"name":"double","arguments":{"x":4}}</tool_call>'
EXTRA_TOKENS = ["<|tool|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]

V1_ENVIRONMENTS = {
    "a user": {"taskset": {"id": "small_tasks", "num_tasks": 3}, "id": "user_env"},
    "tools": {
        "taskset": {"id": "tool_tasks", "num_tasks": 3, "prompt": "four"},
        "agent": {"harness": {"id": "null"}},
    },
    "three agents": {"taskset": {"id": "small_tasks", "num_tasks": 3}, "id": "team_env"},
}


@pytest.fixture
def v1_path(monkeypatch):
    """The tasksets of tests/v1 are found, by their tool servers too."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/v1"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/v1"))


@pytest.fixture(scope="module")
def tokenizer():
    """Drops the thinking of past turns, as Qwen3's template does."""
    tokenizer = make_tokenizer(*EXTRA_TOKENS)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- message['content'] or '' -}}",
        "{%- if loop.last -%}{{- message['content'] or '' -}}"
        "{%- else -%}{{- (message['content'] or '').split('</think>')[-1] -}}{%- endif -%}",
    )
    return tokenizer


@pytest.fixture(scope="module")
def model_folder(tokenizer, tmp_path_factory):
    warm_start = load_example("warm_start")
    set_seed(0)
    model = warm_start.make_model(tokenizer)
    # Knows one thing by heart: to call the tool, and what to say to its result.
    turns = [("user", "four"), ("assistant", CALL), ("tool", "8"), ("assistant", "it is 8")]
    messages = [{"role": role, "content": content} for role, content in turns]
    batch = warm_start.supervised_batch(tokenizer, [{"messages": messages}])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(300):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.003  # a call of 57 tokens is right five times in six or more
    return write_model(tmp_path_factory.mktemp("model"), model, tokenizer)


@pytest.fixture(scope="module")
def server(model_folder, run_server):
    flags = ["--max-model-len", "400", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--enable-lora", "--max-lora-rank", "16"]
    # Beyond loopback every rollout has to show the run's token.
    with run_server(model_folder, *flags, "--host", "0.0.0.0") as server:
        yield server


def make_args(server, tmp_path, **options):
    defaults = {
        "output_dir": f"{tmp_path}/run",
        "use_cpu": True,
        "max_seq_len": 400,
        "max_tokens": 80,
        "temperature": 1.0,
        "batch_size": 8,
        "rollouts_per_example": 4,
        "max_steps": 2,
        "vllm_server_port": server.port,
        "save_strategy": "no",
        "env_workers": 0,
    }
    return RLConfig(**defaults | options)


def rows_of(trainer):
    """What is logged of its steps."""
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def all_different(group):
    """Advantages, none of them 0: samples without an advantage would not be computed."""
    return [1.0 + position for position in range(len(group))]


@pytest.fixture
def replies(monkeypatch):
    """Requests to the server, with what they prompt it with, and its replies, from now on."""
    reply_to, found = ServerClient.reply_to, []

    async def recorded(self, body, prompt_ids, **kwargs):
        reply = await reply_to(self, body, prompt_ids, **kwargs)
        found.append((body, prompt_ids, reply))
        return reply

    monkeypatch.setattr(ServerClient, "reply_to", recorded)
    return found


@pytest.fixture
def roll_out(server, tokenizer, replies, v1_path):
    """Rollouts of an environment one after the other, by default the one with a user, each with the
    requests of it and their replies.

    With `choices` every reply is one of these texts, so that thinking comes from a model with
    random weights.
    """

    def roll_out(args, choices=None, num_rollouts=6, env=None):
        env = env or load_v1_environment(V1_ENVIRONMENTS["a user"])
        runner = make_runner(env, server.url, tokenizer, args)
        sampling, found = args.sampling_args(), []
        if choices:
            sampling |= {"structured_outputs": {"choice": choices}}
        options = {"model": model_name(server), "sampling_args": sampling}

        async def run():
            await runner.open()
            try:
                for _ in range(num_rollouts):
                    replies.clear()
                    request = make_request(policy_version=3, **options)
                    rollout = (await runner.run_group(request))[0]
                    assert rollout.error is None and rollout.num_turns == len(replies)
                    check_tokens(rollout.samples, replies)
                    found.append((rollout, [*replies]))
            finally:
                await runner.close()

        asyncio.run(run())
        return found

    return roll_out


def model_name(server):
    return InferenceClient("127.0.0.1", server.port).status()["served_model_name"]


def check_tokens(samples, replies):
    """The sampled tokens of all replies are those trained: each once, with its logprob, after
    exactly the tokens that the server was prompted with.
    """
    trained = Counter(
        (tuple(sample.token_ids[: at + 1].tolist()), sample.inference_logprobs[at].item())
        for sample in samples
        for at in np.flatnonzero(sample.loss_mask)
    )
    sampled = Counter()
    for _, prompt, reply in replies:
        tokens, logprobs = (values.tolist() for values in reply.sampled)
        sampled.update(
            ((*prompt, *tokens[: at + 1]), logprob) for at, logprob in enumerate(logprobs)
        )
    assert trained == sampled


def test_every_sampled_token_of_several_turns_is_trained_once(server, tmp_path, roll_out):
    """Also where the template drops the thinking of past turns."""
    choices = ["yes", "no, sir", "<think>hm</think>a"]
    for rollout, _ in roll_out(make_args(server, tmp_path), choices):
        assert rollout.num_turns == 3
        (sample,) = rollout.samples
        assert {*sample.policy_versions[~sample.loss_mask].tolist()} == {-1}
    # Any bytes, most replies truncated. Breaks are allowed, wrong tokens are not.
    found = roll_out(make_args(server, tmp_path, max_tokens=30, temperature=2.0))
    assert any(rollout.is_truncated for rollout, _ in found), found


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_reply_ends_at_a_stop_string_whose_tokens_are_trained(
    server, tokenizer, tmp_path, roll_out, is_kept
):
    # More than vLLM's own limit of four.
    stop = {"stop": [";", "#", *map(str, range(4))], "include_stop_str_in_output": is_kept}
    ((rollout, replies),) = roll_out(make_args(server, tmp_path, **stop), ["one#two;"], 1)
    assert rollout.num_turns == 3 and not rollout.is_truncated
    for *_, reply in replies:
        assert tokenizer.decode(reply.sampled[0], skip_special_tokens=True) == "one#"
        message = reply.completion["choices"][0]["message"]
        assert message["content"] == ("one#" if is_kept else "one")
    # The turns are one sequence: what ends a reply in the template is added to it.
    (sample,) = rollout.samples
    assert tokenizer.decode(sample.token_ids).count("<|assistant|>one#<|end|><|user|>") == 2


def test_agents_that_exist_already_are_trained_on_what_was_sampled(
    server, model_folder, tmp_path, roll_out
):
    """openai with streams, calls at once and branches; and the example with curl."""
    args = make_args(server, tmp_path, max_tokens=20, max_off_policy_steps=0)
    branching = env_from_agent(["four"], len_of, in_any_order)
    table = {"id": "small_tasks", "args": {"num_tasks": 3}}
    table["command"] = ["sh", "curl_agent.sh", "{prompt}"]
    curl = load_agent_environment(table, ROOT / "examples/agents")
    for env, num_turns, said in ((branching, 5, None), (curl, 1, ["yes"])):
        for rollout, _ in roll_out(args, said, 2, env):
            assert rollout.num_turns == num_turns
    env = [WeightedEnv(branching, "branching"), WeightedEnv(curl, "curl")]
    for row in rows_of(RLTrainer(model_folder, env, args, advantage_fn=all_different)):
        assert row["mismatch_kl"] < 1e-4 and row["error_share"] == 0


def post(server, body, path="/v1/chat/completions/tokens", key=None):
    headers = {"Authorization": f"Bearer {key or os.environ[TOKEN_VARIABLE]}"}
    reply = httpx.post(
        f"{server.url}{path}", json=body, headers=headers, timeout=60, trust_env=False
    )
    return reply.status_code, reply.text


def test_the_tokens_route_prompts_with_these_tokens_and_others_need_the_token(server):
    """vLLM renders the messages beside the tokens; what a template adds to them does not count."""
    body = {"model": model_name(server), "messages": chat("x" * 500)}
    body |= {"max_tokens": 30, "ignore_eos": True}
    # A reply ends where the context does.
    for tokens, num_sampled in (([5, 6, 7], 30), ([5] * 390, 10)):
        status, reply = post(server, body | {"tokens": pack_numbers(tokens), "seeds": [None]})
        assert status == 200, reply
        usage = json.loads(reply.split(" ", 2)[2])["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(tokens), num_sampled)
    for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
        assert post(server, body, path, key="wrong")[0] == 401


def test_replies_to_a_group_are_those_to_its_requests_one_by_one(server):
    """Ids, logprobs, versions, messages: with the same seeds, nothing changes."""
    body = {"model": model_name(server), "messages": [], "temperature": 1.0, "max_tokens": 80}

    async def ask(client, number, is_first):
        session = RolloutSession(0, None, 7, number)
        async with session.limited(60.0):
            http = client.of_rollout(session)
            return await http.reply_to(body, [70, 71, 72], is_first=is_first)

    async def ask_all(is_first):
        client = ServerClient(f"{server.url}/v1", 60.0)
        try:
            return await asyncio.gather(*(ask(client, number, is_first) for number in range(6)))
        finally:
            await client.close()

    alone, together = (asyncio.run(ask_all(is_first)) for is_first in (False, True))
    assert len({reply.completion["id"] for reply in together}) == 1  # one request
    for one, other in zip(alone, together, strict=True):
        for ours, theirs in zip(one.sampled, other.sampled, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        assert one.policy_versions == other.policy_versions
        assert one.completion["usage"] == other.completion["usage"]
        for name in ("message", "finish_reason"):
            ours, theirs = (reply.completion["choices"][0][name] for reply in (one, other))
            assert ours == theirs


def test_no_token_is_older_than_the_bound(server, model_folder, tmp_path, v1_path):
    """Weights change while requests run: tokens of one batch have several versions."""
    args = make_args(
        server, tmp_path, max_off_policy_steps=1, max_steps=6, max_tokens=60, batch_size=16,
        learning_rate=1e-4,
    )  # fmt: skip
    seen = []

    class Watching(RLTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            versions = {v for s in self.batch.samples for v in s.policy_versions.tolist()}
            seen.append(versions - {-1})
            return loss

    env = load_v1_environment(V1_ENVIRONMENTS["a user"])
    rows = rows_of(Watching(model_folder, env, args))
    for step, (versions, row) in enumerate(zip(seen, rows, strict=True)):
        assert step - 1 <= min(versions) <= max(versions) <= step
        assert row["staleness_max"] == step - min(versions)
    assert len(rows) == 6 and any(len(versions) > 1 for versions in seen)


@pytest.mark.parametrize("name", V1_ENVIRONMENTS)
def test_a_step_on_an_environment_of_v1_trains_exactly_what_was_sampled(
    server, model_folder, tmp_path, replies, v1_path, name
):
    env = load_v1_environment(V1_ENVIRONMENTS[name])
    args = make_args(server, tmp_path, max_off_policy_steps=0, max_steps=1)
    trainer = RLTrainer(model_folder, env, args, advantage_fn=all_different)
    (row,) = rows_of(trainer)
    assert row["error_share"] == 0 and row["staleness_max"] == 0
    is_tight = name == "tools"  # the model is sure of its calls
    assert row["importance_ratio"] == pytest.approx(1.0, abs=1e-4 if is_tight else 1e-3)
    assert row["mismatch_kl"] < (1e-6 if is_tight else 1e-4)
    if name == "three agents":  # the judge is not trained
        replies = [item for item in replies if item[0]["max_tokens"] != 7]
        assert len(replies) == len(trainer.batch.rollouts) == 16
        assert row["env/critic/reward"] < 0 < row["env/writer/reward"]
    check_tokens(trainer.batch.samples, replies)
    if name == "tools":
        assert row["env/tools_called"] > 0.5 and row["broken_turn_share"] == 0
    else:
        assert row["num_turns"] == (3 if name == "a user" else 1)


SHAPES = ("kuhn_like", "glossary_like", "proposer_like")


def test_environments_as_their_authors_publish_them_train_from_a_toml(
    server, model_folder, tmp_path, v1_path
):
    toml = tmp_path / "rl.toml"
    tables = [f'[[env]]\ntaskset = {{ id = "{name}" }}' for name in SHAPES]
    toml.write_text("\n".join([f'model = "{model_folder}"', *tables]))
    # Six groups a step, of each environment two, as far as the sequence deals them so.
    args = make_args(
        server, tmp_path, batch_size=12, rollouts_per_example=2, eval_examples=1, max_tokens=60
    )
    trainer = RLTrainer(model_folder, load_run_config(toml).load_envs(), args)
    assert trainer.evaluate()["eval_error_share"] == 0
    rows = rows_of(trainer)
    assert len(rows) == 2
    for row in rows:
        assert row["error_share"] == 0, row
        assert all(row[f"{name}/group_share"] >= 0.1 for name in SHAPES)
        assert row["kuhn_like/player0/reward"] == -row["kuhn_like/player1/reward"]
        assert row["proposer_like/proposer/reward"] == -row["proposer_like/solver/reward"]
    assert max(row["glossary_like/num_turns"] for row in rows) > 1  # the tool was called
