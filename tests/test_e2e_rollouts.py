"""Rollouts of several turns on the real vLLM server: each token that was sampled is trained, once,
after exactly the tokens that it was sampled after.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import set_seed

from tests.conftest import running_server
from tests.helpers import ROOT, load_example, make_request, serving
from verifiers_rl import RLConfig, RLTrainer, WeightedEnv
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.v1_loading import load_v1_environment
from verifiers_rl.inference.client import TOKEN_VARIABLE, InferenceClient
from verifiers_rl.inference.packed_tokens import pack_ids, unpack_ids, unpack_sampled
from verifiers_rl.inference.rollout_client import ServerClient

pytestmark = pytest.mark.e2e

# The template would render this call with a space after each colon and comma.
CALL = '<tool_call>{"name":"double","arguments":{"x":4}}</tool_call>'
EXTRA_TOKENS = ["<|tool|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]

NULL = {"id": "null"}
V1_ENVIRONMENTS = {
    "one turn": {"taskset": {"id": "small_tasks", "num_tasks": 3}, "agent": {"harness": NULL}},
    "a user": {"taskset": {"id": "small_tasks", "num_tasks": 3}, "id": "user_env"},
    "tools": {
        "taskset": {"id": "tool_tasks", "num_tasks": 3, "prompt": "four"},
        "agent": {"harness": NULL},
    },
    "three agents": {"taskset": {"id": "small_tasks", "num_tasks": 3}, "id": "team_env"},
}


@pytest.fixture
def v1_path(monkeypatch):
    """The tasksets of tests/v1 are found, by their tool servers too."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "v1"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "v1"))


@pytest.fixture(scope="module")
def tokenizer():
    """Drops the thinking of past turns, as Qwen3's template does."""
    tokenizer = load_example("warm_start").make_tokenizer(EXTRA_TOKENS)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- message['content'] or '' -}}",
        "{%- if loop.last -%}{{- message['content'] or '' -}}"
        "{%- else -%}{{- (message['content'] or '').split('</think>')[-1] -}}{%- endif -%}",
    )
    # As Qwen3's does: without thinking, a reply begins behind an empty one.
    tokenizer.chat_template += (
        "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking -%}"
        "{{- '<think></think>' -}}{%- endif -%}"
    )
    return tokenizer


@pytest.fixture(scope="module")
def model_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
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
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = ["--max-model-len", "400", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--enable-lora", "--max-lora-rank", "16"]
    # Beyond loopback every rollout has to show the run's token.
    with running_server(model_folder, log, *flags, "--host", "0.0.0.0") as server:
        yield server


def make_args(server, tmp_path, **options):
    defaults = {"max_seq_len": 400, "max_tokens": 80, "temperature": 1.0, "batch_size": 8}
    defaults |= {"rollouts_per_example": 4, "use_cpu": True, "max_steps": 2}
    defaults |= {"output_dir": str(tmp_path / "run"), "vllm_server_port": server.port}
    defaults |= {"save_strategy": "no", "logging_steps": 1}
    defaults |= {"env_workers": 0}
    return RLConfig(**{**defaults, **options})


def all_different(group):
    """Advantages, none of them 0: samples without an advantage would not be computed."""
    return [1.0 + position for position in range(len(group))]


def roll_out(server, tokenizer, env, args, choices=None, num_rollouts=6):
    """Rollouts one after the other, each with the server's raw replies to it.

    With `choices` every reply is one of these texts, so that tool calls and thinking come from a
    model with random weights.
    """
    runner = make_runner(env, server.url, tokenizer, args)
    sampling = args.sampling_args()
    if choices:
        sampling["extra_body"] |= {"structured_outputs": {"choice": choices}}

    async def run():
        await runner.open()
        post, replies, found = ServerClient.post, [], []

        async def recorded(self, path, **kwargs):
            reply = await post(self, path, **kwargs)
            replies.append((kwargs["body"], json.loads(reply.content)))
            return reply

        try:
            with patch.object(ServerClient, "post", recorded):
                for _ in range(num_rollouts):
                    replies.clear()
                    request = make_request(
                        model=str(args.model_name), policy_version=3, sampling_args=sampling
                    )
                    group = await runner.run_group(request)
                    found.append((group[0], list(replies)))
        finally:
            await runner.close()
        return found

    args.model_name = model_name(server)
    return asyncio.run(run())


def model_name(server):
    return InferenceClient("127.0.0.1", server.port).served_model_name


def sampled_of(body, reply):
    """Prompt, sampled tokens and logprobs of a request of either kind and its raw reply."""
    if "packed_tokens" in reply:
        token_ids, logprobs = unpack_sampled(reply["packed_tokens"])
        return unpack_ids(body["tokens"]).tolist(), token_ids.tolist(), logprobs.tolist()
    choice = reply["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    prompt = body.get("token_ids") or reply["prompt_token_ids"]
    assert body.get("tokens", prompt) == prompt
    return prompt, choice["token_ids"], logprobs


def check_tokens(rollout, replies):
    """The sampled tokens of all replies are those trained: each once, in order, with its logprob,
    after exactly the tokens that the server was prompted with.
    """
    assert rollout.error is None, rollout.error
    assert rollout.num_turns == len(replies)
    trained = [
        (sample.token_ids[:at].tolist(), token, sample.inference_logprobs[at])
        for sample in rollout.samples
        for at, token in enumerate(sample.token_ids.tolist())
        if sample.loss_mask[at]
    ]
    expected = []
    for body, reply in replies:
        prompt, tokens, logprobs = sampled_of(body, reply)
        for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            expected.append(([*prompt, *tokens[:at]], token, logprob))
    assert [token for _, token, _ in trained] == [token for _, token, _ in expected]
    assert [logprob for *_, logprob in trained] == pytest.approx([lp for *_, lp in expected])
    assert [context for context, *_ in trained] == [context for context, *_ in expected]


def test_every_sampled_token_of_several_turns_is_trained_once(server, tokenizer, tmp_path, v1_path):
    """Also where the template drops the thinking of past turns."""
    env = load_v1_environment(V1_ENVIRONMENTS["a user"])
    choices = ["yes", "no, sir", "<think>hm</think>a"]
    for rollout, replies in roll_out(server, tokenizer, env, make_args(server, tmp_path), choices):
        check_tokens(rollout, replies)
        assert rollout.num_turns == 3
        (sample,) = rollout.samples
        versions = zip(sample.policy_versions, sample.loss_mask, strict=True)
        assert {version for version, in_loss in versions if not in_loss} == {-1}


def test_unrestrained_replies_cut_off_anywhere_stay_exact(server, tokenizer, tmp_path, v1_path):
    """Any bytes, most replies truncated. Breaks are allowed, wrong tokens are not."""
    env = load_v1_environment(V1_ENVIRONMENTS["a user"])
    args = make_args(server, tmp_path, max_tokens=30, temperature=2.0)
    found = roll_out(server, tokenizer, env, args)
    for rollout, replies in found:
        check_tokens(rollout, replies)
    assert any(rollout.is_truncated for rollout, _ in found), found


def test_tools_do_not_change_what_is_sampled(server, model_folder, tmp_path, v1_path):
    args = make_args(server, tmp_path, max_off_policy_steps=0, max_steps=1)
    env = load_v1_environment(V1_ENVIRONMENTS["tools"])
    trainer = RLTrainer(str(model_folder), env, args, advantage_fn=all_different)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    assert row["num_turns"] > 1
    assert row["importance_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert row["mismatch_kl"] < 1e-6


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_reply_ends_at_a_stop_string_whose_tokens_are_trained(
    server, tokenizer, tmp_path, v1_path, is_kept
):
    env = load_v1_environment(V1_ENVIRONMENTS["a user"])
    stop = {"stop": [";", "#"], "include_stop_str_in_output": is_kept}
    args = make_args(server, tmp_path, **stop)
    for reply, sampled, text in (
        ("yes;no", "yes;", "yes"),
        ("one#two;", "one#", "one"),
        ("whole", "whole", "whole"),
    ):
        ((rollout, replies),) = roll_out(server, tokenizer, env, args, [reply], num_rollouts=1)
        check_tokens(rollout, replies)
        assert rollout.num_turns == 3 and not rollout.is_truncated
        for turn in replies:
            assert tokenizer.decode(sampled_of(*turn)[1], skip_special_tokens=True) == sampled
            message = turn[1]["choices"][0]["message"]
            assert message["content"] == (sampled if is_kept else text)
        # The turns are one sequence: what ends a reply in the template is added to it.
        (sample,) = rollout.samples
        whole = tokenizer.decode(sample.token_ids)
        assert whole.count(f"<|assistant|>{sampled}<|end|><|user|>") == 2


def test_variables_reach_the_chat_template_in_every_turn(server, tokenizer, tmp_path, v1_path):
    env = load_v1_environment(V1_ENVIRONMENTS["a user"])
    asked = {}
    for name, given in (("on", {}), ("off", {"enable_thinking": False})):
        args = make_args(server, tmp_path, chat_template_kwargs=given)
        ((rollout, replies),) = roll_out(server, tokenizer, env, args, ["a"], num_rollouts=1)
        check_tokens(rollout, replies)
        asked[name] = [tokenizer.decode(sampled_of(*turn)[0]) for turn in replies]
    for on, off in zip(asked["on"], asked["off"], strict=True):
        assert on.endswith("<|assistant|>") and off.endswith("<|assistant|><think></think>")


def post(server, body, path="/v1/chat/completions/tokens", key=None):
    headers = {"Authorization": f"Bearer {key or os.environ[TOKEN_VARIABLE]}"}
    headers |= {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_tokens_route_prompts_with_these_tokens_and_refuses_others(server, tokenizer):
    body = {"model": model_name(server), "messages": [{"role": "user", "content": "something"}]}
    body |= {"max_tokens": 2, "return_token_ids": True, "tokens": pack_ids([5, 6, 7])}
    status, reply = post(server, body)
    assert status == 200 and reply["usage"]["prompt_tokens"] == 3
    for tokens, message in (
        ([], "must be at least one token id"),
        ([5, len(tokenizer)], f"{len(tokenizer)} is no token id below {len(tokenizer)}"),
        ([5] * 400, "a prompt of 400 is longer than the model's context length"),
    ):
        status, reply = post(server, body | {"tokens": pack_ids(tokens)})
        assert status == 400 and message in reply["error"], reply
    for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
        status, reply = post(server, body, path, key="wrong")
        assert status == 401 and "wrong or missing key" in reply["error"]
    # Requests without tokens are as before.
    body.pop("tokens")
    status, reply = post(server, body, "/v1/chat/completions")
    assert status == 200 and len(reply["prompt_token_ids"]) == len("something") + 3


def test_packed_tokens_are_those_of_openais_form(server):
    common = {"model": model_name(server), "temperature": 1.0, "seed": 7, "max_tokens": 30}
    common |= {"return_token_ids": True}
    asked = common | {"prompt": [70, 71, 72], "logprobs": 1}
    status, expected = post(server, asked, "/v1/completions")
    (choice,) = expected["choices"]
    assert status == 200 and choice["prompt_token_ids"] == [70, 71, 72]
    body = common | {"messages": [{"role": "user", "content": "."}], "logprobs": True}
    body |= {"tokens": pack_ids([70, 71, 72])}
    status, reply = post(server, body)
    assert status == 200, reply
    token_ids, logprobs = unpack_sampled(reply.pop("packed_tokens"))
    assert token_ids.tolist() == choice["token_ids"]
    assert logprobs.tolist() == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert (reply["choices"][0]["message"]["content"] or "") == choice["text"]
    for name in ("logprobs", "token_ids"):
        assert not reply["choices"][0].get(name), name
    assert not reply.get("prompt_token_ids")
    assert reply["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    # vLLM's own errors are as they were.
    status, reply = post(server, body | {"temperature": -1})
    assert status == 400 and "packed_tokens" not in reply and "temperature" in str(reply)


def test_environments_mixed_by_weight_train_together(server, model_folder, tmp_path, v1_path):
    tools = load_v1_environment(V1_ENVIRONMENTS["tools"])
    talk = load_v1_environment(V1_ENVIRONMENTS["a user"])
    mixed = [
        WeightedEnv(talk, "talk", weight=3, sampling_args={"max_tokens": 5}),
        WeightedEnv(tools, "tools", sampling_args={"max_tokens": 9}),
        WeightedEnv(
            load_v1_environment(V1_ENVIRONMENTS["one turn"]), "new", only="eval", eval_examples=2
        ),
    ]
    args = make_args(server, tmp_path, batch_size=32, rollouts_per_example=4, max_steps=4)
    trainer = RLTrainer(str(model_folder), mixed, args)
    evaluated = trainer.evaluate()
    names = {f"eval_{name}/reward" for name in ("talk", "tools", "new")}
    assert names | {"eval_reward"} <= evaluated.keys()
    # All examples of both that are trained on, and two of the third.
    assert evaluated["eval_num_rollouts"] == 6 + 2
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 4
    shares = [row["talk/group_share"] for row in rows]
    assert sum(shares) / len(shares) == pytest.approx(0.75, abs=0.05)
    for row in rows:
        assert "new/reward" not in row
        assert row["talk/num_turns"] == 3 and row["tools/num_turns"] < 3
        share = row["talk/group_share"]
        both = share * row["talk/reward"] + (1 - share) * row["tools/reward"]
        assert row["reward"] == pytest.approx(both)
        assert row["talk/completion_tokens"] <= 15 < 27
    longest = {
        env: max(r.num_sampled_tokens / r.num_turns for r in trainer.batch.rollouts if r.env == env)
        for env in ("talk", "tools")
    }
    assert longest["talk"] <= 5 < longest["tools"] <= 9


@pytest.mark.parametrize("max_off_policy_steps", [0, 2])
def test_no_token_is_older_than_the_bound(
    server, model_folder, tmp_path, v1_path, max_off_policy_steps
):
    """With 2, weights change while requests run: tokens of one batch have several versions."""
    args = make_args(
        server, tmp_path, max_off_policy_steps=max_off_policy_steps, max_steps=6, max_tokens=60,
        batch_size=16, learning_rate=1e-4,
    )  # fmt: skip
    seen = []

    class Watching(RLTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            samples = self.batch.samples
            seen.append({v for s in samples for v in s.policy_versions.tolist() if v >= 0})
            return loss

    env = load_v1_environment(V1_ENVIRONMENTS["a user"])
    trainer = Watching(str(model_folder), env, args)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == len(seen) == 6
    for step, versions in enumerate(seen):
        assert step - max_off_policy_steps <= min(versions) <= max(versions) <= step
        if max_off_policy_steps == 0:
            assert versions == {step}
    assert [row["staleness_max"] for row in rows] == [
        float(step - min(versions)) for step, versions in enumerate(seen)
    ]
    if max_off_policy_steps == 2:
        assert any(len(versions) > 1 for versions in seen)


def test_workers_roll_out_as_the_trainer_does_and_train(
    server, model_folder, tokenizer, tmp_path, v1_path
):
    env = load_v1_environment(V1_ENVIRONMENTS["a user"])
    options = {"max_tokens": 4, "top_k": 1}  # greedy: the same replies each time

    def groups(env_workers):
        args = make_args(server, tmp_path, env_workers=env_workers, **options)
        runner = make_runner(env, server.url, tokenizer, args)
        given = {"model": model_name(server), "sampling_args": args.sampling_args()}

        async def run():
            try:
                await runner.open()
                return [
                    await runner.run_group(make_request(i, policy_version=3, **given))
                    for i in range(min(6, runner.sizes("train")[0]))
                ]
            finally:
                await runner.close()

        return [group[0] for group in asyncio.run(run())]

    for here, there in zip(groups(0), groups(1), strict=True):
        assert there.error is None and here.error is None
        assert there.num_turns == here.num_turns > 1
        assert there.reward == here.reward and there.completion == here.completion
        assert len(there.samples) == len(here.samples)
        for sample, same in zip(there.samples, here.samples, strict=True):
            assert np.array_equal(sample.token_ids, same.token_ids)
            assert np.array_equal(sample.loss_mask, same.loss_mask)
            assert np.array_equal(sample.policy_versions, same.policy_versions)
            assert sample.inference_logprobs == pytest.approx(same.inference_logprobs, abs=1e-4)

    args = make_args(server, tmp_path, env_workers=2, max_tokens=4, max_steps=3)
    trainer = RLTrainer(str(model_folder), env, args)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 3 and all(row["error_share"] == 0 for row in rows)
    assert [row["staleness_max"] for row in rows] == [0, 1, 1]


@pytest.mark.parametrize("name", V1_ENVIRONMENTS)
def test_a_step_on_an_environment_of_v1_trains_exactly_what_was_sampled(
    server, model_folder, tmp_path, monkeypatch, v1_path, name
):
    replies = []
    post = ServerClient.post

    async def recorded(self, path, **kwargs):
        reply = await post(self, path, **kwargs)
        replies.append((kwargs["body"], json.loads(reply.content)))
        return reply

    monkeypatch.setattr(ServerClient, "post", recorded)
    env = load_v1_environment(V1_ENVIRONMENTS[name])
    args = make_args(server, tmp_path, max_off_policy_steps=0, max_steps=1)
    trainer = RLTrainer(str(model_folder), env, args, advantage_fn=all_different)
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    assert row["error_share"] == 0 and row["staleness_max"] == 0
    assert row["importance_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert row["mismatch_kl"] < 1e-4

    trained = Counter(
        (tuple(sample.token_ids[: at + 1].tolist()), sample.inference_logprobs[at].item())
        for sample in trainer.batch.samples
        for at in range(len(sample.token_ids))
        if sample.loss_mask[at]
    )
    if name == "three agents":  # the judge is not trained
        of_others = [item for item in replies if item[0]["max_tokens"] != 7]
        assert len(of_others) == 2 * len(replies) / 3 == len(trainer.batch.rollouts) == 16
        replies = of_others
    sampled = Counter()
    for body, reply in replies:
        prompt, tokens, logprobs = sampled_of(body, reply)
        sampled.update(
            ((*prompt, *tokens[: at + 1]), logprob) for at, logprob in enumerate(logprobs)
        )
    assert trained == sampled
    if name == "three agents":
        assert row["env/critic/reward"] < 0 < row["env/writer/reward"]
    turns = {"one turn": 1, "a user": 3, "tools": 1, "three agents": 1}[name]
    assert row["num_turns"] > 1 if name == "tools" else row["num_turns"] == turns
    if name == "tools":
        assert row["env/tools_called"] > 0.5 and row["broken_turn_share"] == 0


SHAPES = ("kuhn_like", "glossary_like", "scratchpad_like", "code_golf_like", "proposer_like")


def test_environments_as_their_authors_publish_them_train_from_a_toml(
    server, model_folder, tmp_path, v1_path, capsys
):
    toml = tmp_path / "rl.toml"
    tables = [f'[[env]]\ntaskset = {{ id = "{name}" }}' for name in SHAPES]
    toml.write_text("\n".join([f'model = "{model_folder}"', *tables]))
    # Ten groups a step, of each environment two, as far as the sequence deals them so.
    options = {"batch_size": 20, "rollouts_per_example": 2, "eval_examples": 1, "max_tokens": 60}
    trainer = RLTrainer(
        str(model_folder), load_run_config(toml).load_envs(), make_args(server, tmp_path, **options)
    )
    lines = capsys.readouterr().out
    assert "'kuhn_like': DuelEnv, player0 plays in verifiers_rl's chat" in lines
    assert "; player1 plays in verifiers_rl's chat" in lines
    assert "a stream of tasks, in its order, 1 for evaluations" in lines
    evaluated = trainer.evaluate()
    assert evaluated["eval_error_share"] == 0, evaluated
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["error_share"] == 0, row
        assert all(row[f"{name}/group_share"] >= 0.1 for name in SHAPES)
        assert row["kuhn_like/player0/reward"] == -row["kuhn_like/player1/reward"]
        assert row["scratchpad_like/lost_calls"] == 0 and row["code_golf_like/ran"] == 1
        assert row["proposer_like/proposer/reward"] == -row["proposer_like/solver/reward"]
    assert max(row["glossary_like/num_turns"] for row in rows) > 1  # the tool was called
    assert max(row["scratchpad_like/called"] for row in rows) > 0


def test_the_first_example_of_the_readme_runs_as_it_stands(server, model_folder, tmp_path):
    """Word for word. It finds the tiny model where it looks for its own, and RLConfig sends it to
    the tests' server for two small steps.
    """
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:1]
    assert "env_from(" in block and len(block.splitlines()) <= 20
    (name,) = re.findall(r'model="([\w.-]+/[\w.-]+)"', block)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).symlink_to(model_folder)
    (tmp_path / "train.py").write_text(block)
    small = {"vllm_server_port": server.port, "max_steps": 2, "batch_size": 16}
    small |= {"rollouts_per_example": 4, "max_seq_len": 200, "max_tokens": 16, "use_cpu": True}
    run = (
        "import runpy, verifiers_rl\n"
        "init = verifiers_rl.RLConfig.__init__\n"
        f"verifiers_rl.RLConfig.__init__ = lambda self, **own: init(self, **own | {small!r})\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = tmp_path.glob("outputs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["error_share"] for row in steps] == [0, 0]


def test_gepa_optimises_a_prompt_against_the_server(server, v1_path, tmp_path):
    """As docs/environments.md says. The teacher that proposes prompts is a stand-in, because
    its prompt is too long for the tiny model.
    """
    asked = []

    async def teach(request):
        asked.append((await request.json())["messages"][-1]["content"])
        message = {"role": "assistant", "content": "```\nSay much.\n```"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "teacher"}
        return web.json_response(reply | {"choices": [choice]})

    async def run():
        async with serving(teach) as teacher:
            command = [str(Path(sys.executable).parent / "vf-gepa"), "small_tasks"]
            command += ["--env.taskset.num-tasks", "3", "--env.agent.harness.id", "verifiers_rl"]
            command += ["--env.agent.runtime.type", "subprocess", "--model", model_name(server)]
            command += ["--client.base-url", f"{server.url}/v1"]
            command += ["--client.api-key-var", "VERIFIERS_RL_TOKEN"]
            command += ["--reflection-client.base-url", f"{teacher}/v1"]
            command += ["--reflection-client.api-key-var", "NO_KEY", "--run.dir", "gepa"]
            command += ["--initial-prompt", "Be brief.", "--sampling.max-tokens", "20"]
            command += ["--num-train", "1", "--num-val", "2", "--max-total-rollouts", "4"]
            process = await asyncio.create_subprocess_exec(
                *command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            output, _ = await asyncio.wait_for(process.communicate(), 120)
            return process.returncode, output.decode()

    status, output = asyncio.run(run())
    assert status == 0, output
    folder = tmp_path / "outputs" / "gepa"
    episodes = [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
    traces = [trace for episode in episodes for trace in episode["traces"]]
    assert len(traces) >= 4 and not any(trace["errors"] for trace in traces), output
    assert {"Be brief.", "Say much."} == {t["task"]["data"]["system_prompt"] for t in traces}
    assert any(t["rewards"]["length"]["score"] > 0 for t in traces)
    assert "question 0" in asked[0]
    best = (folder / "best_system_prompt.txt").read_text()
    assert best in ("Be brief.", "Say much.")


def test_a_long_system_prompt_of_the_template_takes_no_room(server, tokenizer):
    """vLLM renders the messages beside the tokens; what a template adds to them does not count."""
    body = {"model": model_name(server), "messages": [{"role": "user", "content": "x" * 500}]}
    body |= {"max_tokens": 30, "tokens": pack_ids([5] * 360)}
    status, reply = post(server, body)
    assert status == 200, reply
    assert reply["usage"]["prompt_tokens"] == 360
    assert reply["usage"]["completion_tokens"] <= 30
    # Nor does the room that the messages would have had: the context ends where it ends.
    status, reply = post(server, body | {"tokens": pack_ids([5] * 390), "ignore_eos": True})
    assert status == 200 and reply["usage"]["completion_tokens"] == 10
