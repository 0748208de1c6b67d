"""`vf-rl generate` against an endpoint that answers as OpenAI's does."""

import argparse
import asyncio
import json
import shutil
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import verifiers.v1 as vf
from aiohttp import web

from tests.conftest import free_port
from tests.helpers import EXAMPLE_MODULE, ROOT, chat, write_model
from tests.serving import chat_reply, in_thread, serving
from verifiers_rl import RLConfig, WeightedEnv, env_from
from verifiers_rl.cli import rl
from verifiers_rl.cli.children import LocalChild
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.cli.plan import SERVERS_VARIABLE, assign_gpus, plan_servers
from verifiers_rl.envs.played import PlayedEnvironment
from verifiers_rl.envs.records import without_none
from verifiers_rl.sft.conversations import Tokenization, read_dataset
from verifiers_rl.sft.generate import (
    Endpoint,
    GenerationError,
    make_one_server,
    make_players,
    sampling_of,
    write_rows,
)


def completed(content, finish_reason="stop", **fields):
    return web.json_response(chat_reply(content, finish_reason, fields))


@pytest.fixture
def rl_toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "base")
    (tmp_path / "held.jsonl").write_text("")
    (tmp_path / "rl.toml").write_text(
        'model = "./base"\n[env.taskset]\nid = "reverse_text"\nnum_tasks = 3\ninstruction = ""\n'
        '[env.agent.harness]\nid = "null"\n[trainer]\ngpus = 0\n[trainer.args]\ntop_k = 5\n'
    )
    shutil.copy(EXAMPLE_MODULE, tmp_path)
    return tmp_path / "rl.toml"


@pytest.fixture
def generate(rl_toml, run_main):
    """Runs the command with these words. Returns its status, and what it printed on both ways."""
    return partial(run_main, rl.main, "generate", "@", rl_toml)


def test_rollouts_of_any_endpoint_become_data(generate, monkeypatch, tokenizer):
    asked = []

    async def reply(request):
        body = await request.json()
        asked.append((body, request.headers["Authorization"]))
        text = body["messages"][-1]["content"]
        # The first two rollouts are right, the third is cut, the others are wrong.
        number = len(asked)
        return completed(
            text[::-1] if number <= 3 else "no", "length" if number == 3 else "stop",
            reasoning_content="so", reasoning_details=[{"text": "elsewhere"}],
        )  # fmt: skip

    with in_thread(serving(reply)) as url:
        monkeypatch.setenv("MY_KEY", "secret")
        words = f"-n 2 --min-reward 1 --endpoint {url}/v1 m --api-key-var MY_KEY -o data/new.jsonl "
        words += "--trainer.args.max_concurrent 1 --trainer.args.chat_template_kwargs.effort low"
        status, out, _ = generate(*words.split())
    rows = read_dataset(["data/new.jsonl"])
    assert status == 0 and len(asked) == 6 and [row["example"] for row in rows] == [0, 0]
    body, authorization = asked[0]
    assert (body["model"], body["top_k"], authorization) == ("m", 5, "Bearer secret")
    assert "min_p" not in body  # which no endpoint but vLLM's knows
    for row in rows:
        question, answer = row["messages"]
        assert answer["content"] == question["content"][::-1]
        assert answer["reasoning_content"] == "so" and "reasoning_details" not in answer
        assert (row["reward"], row["environment"], row["model"]) == (1.0, "reverse_text", "m")
        assert row["chat_template_kwargs"] == body["chat_template_kwargs"] == {"effort": "low"}
    assert "2 of 6 rollouts written" in out and "1 left out, because a length limit" in out
    # What it has written is data for vf-sft.
    assert len(Tokenization(tokenizer).of_rows(rows, "it")) == 2


def test_an_endpoint_that_refuses_all_requests_is_named_and_fails(generate, monkeypatch):
    keys = []

    async def refuse(request):
        keys.append(request.headers.get("Authorization", ""))
        return web.json_response({"error": {"message": "no such key"}}, status=401)

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with in_thread(serving(refuse)) as url:
        status, _, error = generate("--endpoint", f"{url}/v1", "m", "-o", "new.jsonl")
    assert status == 1 and "no rollout succeeded" in error and "no such key" in error
    assert keys and "secret" not in " ".join(keys)  # it is OpenAI's alone


def test_an_endpoint_that_is_busy_is_asked_again(generate, monkeypatch):
    monkeypatch.setattr("verifiers.v1.utils.retries.backoff", lambda attempt: 0.01)
    statuses = iter([429, 500, 502, 503])

    async def reply(request):
        if status := next(statuses, None):
            return web.json_response({"error": {"message": "busy"}}, status=status)
        return completed("no")

    with in_thread(serving(reply)) as url:
        status, out, _ = generate("--endpoint", f"{url}/v1", "m", "-o", "new.jsonl")
    assert status == 0 and "3 of 3 rollouts written" in out


def test_without_a_row_all_reasons_are_named(generate):
    async def reply(request):
        return completed("no", "length")

    with in_thread(serving(reply)) as url:
        status, _, error = generate("--endpoint", f"{url}/v1", "m", "-o", "new.jsonl")
    assert status and "error: nothing is written: each rollout failed, was cut" in error


@pytest.mark.parametrize(
    "words, problem",
    [
        ("-o held.jsonl", "holds held.jsonl already; choose another"),
        ("-o new.jsonl -n 0", "--rollouts 0: must be an integer >= 1"),
        ("-o new.jsonl --api-key-var K", "without effect unless --endpoint is given"),
    ],
)
def test_an_option_of_generate_that_cannot_work_is_named(generate, words, problem):
    status, _, error = generate(*words.split())
    assert status == 1 and problem in error


# --- Requests and rollouts ------------------------------------------------------------------------


def test_requests_to_our_server_have_all_sampling_options():
    """An option that is left out would have the value in the model's generation_config.json."""
    neutral = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    neutral |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    given = {"top_p": 0.9, "stop": ["."], "include_stop_str_in_output": True, "max_tokens": 9}
    args = RLConfig(use_cpu=True, sampling_mask=True, router_replay=True, **given)
    assert sampling_of(args, True) == neutral | given
    assert sampling_of(args, False) == {"temperature": 0.7, **given}


def made_of(play, num, num_at_once):
    """An environment of this many examples, each played by `await play("train", number)`."""

    async def nothing(): ...

    options = SimpleNamespace(max_concurrent=num_at_once)
    return SimpleNamespace(
        name="played",
        options=options,
        sizes=lambda split: [num],
        play=play,
        open=nothing,
        close=nothing,
    )


ASKED = argparse.Namespace(split="train", examples=None, rollouts=1, min_reward=0.0)


def row_of(number):
    return {"example": number, "reward": 1.0}, False


def test_replies_that_the_tasks_own_prompt_has_are_written_as_prompt():
    env = env_from([{"prompt": chat("ab", "ba", "abc")}], lambda completion: 1.0)
    written = []

    async def reply(request):
        return completed("cba")

    async def run():
        async with serving(reply) as url:
            envs, at = [WeightedEnv(env, "it")], Endpoint(f"{url}/v1", "m", "KEY")
            (made,) = make_players(envs, RLConfig(use_cpu=True), at)
            await write_rows(made, ASKED, written.append)

    asyncio.run(run())
    (row,) = written
    texts = [[one["content"] for one in row[name]] for name in ("prompt", "completion")]
    assert texts == [["ab", "ba", "abc"], ["cba"]] and "messages" not in row


def test_a_reply_that_the_environment_writes_is_not_to_be_learned_and_tools_are_in_the_row():
    said = [vf.UserMessage(content="1+1"), vf.AssistantMessage(content="2"),
            vf.AssistantMessage(content="Next."), vf.AssistantMessage(content="3")]  # fmt: skip
    nodes = [SimpleNamespace(message=m, sampled=n in (1, 3)) for n, m in enumerate(said)]
    parameters = {"properties": {"x": {"type": "integer", "default": None}}}
    tools = [vf.Tool(name="f", description="d", parameters=parameters)]
    trace = Mock(reward=1.0, branches=[Mock(nodes=nodes)], tools=tools, calls=[], is_timeout=False)
    env = Mock(_template=None)
    row, _ = PlayedEnvironment._row(env, trace, 0)
    assert [message.get("weight") for message in row["messages"]] == [None, None, 0, None]
    # Of a row, keys of null are left out, but not in a text.
    (found,) = json.loads(without_none({"tools": row["tools"]})["tools"])
    assert found["function"]["parameters"] == parameters


def test_a_rollout_is_written_when_it_ends_not_behind_slower_ones():
    others, written = asyncio.Event(), []

    async def play(split, number):
        if number == 0:
            await others.wait()
        return [row_of(number)]

    def write(row):
        written.append(row["example"])
        if len(written) == 2:
            others.set()

    asyncio.run(asyncio.wait_for(write_rows(made_of(play, 3, 3), ASKED, write), 20))
    assert written == [1, 2, 0]


def test_a_rollout_begins_when_there_is_a_place_for_it():
    num_tasks = []

    async def play(split, number):
        num_tasks.append(len(asyncio.all_tasks()))
        await asyncio.sleep(0)
        return [row_of(number)]

    num = asyncio.run(write_rows(made_of(play, 100, 2), ASKED, lambda row: None))
    assert num == len(num_tasks) == 100
    assert max(num_tasks) <= 5  # this one, and of each place its own and the rollout's


def test_if_the_first_rollouts_all_fail_the_others_are_not_tried():
    played = []

    async def play(split, number):
        played.append(number)
        await asyncio.sleep(0)
        raise ValueError(f"no {number}")

    with pytest.raises(GenerationError, match=r"'played': no rollout succeeded.*no 0"):
        asyncio.run(write_rows(made_of(play, 500, 1), ASKED, lambda row: None))
    assert 10 <= len(played) <= 12


# --- The server -----------------------------------------------------------------------------------


def test_all_gpus_are_the_servers_because_nothing_is_trained(rl_toml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    config = load_run_config(rl_toml, ["--inference.gpus=2", "--inference.replicas=2"])
    make_one_server(config)
    plans = plan_servers(config)
    assert assign_gpus(config, plans) == {"inference": "0,1,2,3", "trainer": ""}
    command = " ".join(plans[0].command("127.0.0.1", 8000))
    assert "--data-parallel-size 2" in command and "--tensor-parallel-size 2" in command


def test_it_runs_beside_a_server_in_place_of_a_trainer_and_ends_with_it(generate, monkeypatch):
    """The command starts itself once more, which finds the server that was started for it."""
    started = []

    def supervise(config, plans, launcher):
        (trainer,) = launcher.start_trainers({})
        assert trainer.wait(60.0)
        launcher.close()
        started.extend(plans)
        return trainer.poll()

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv(SERVERS_VARIABLE, raising=False)
    monkeypatch.setattr("verifiers_rl.sft.generate.supervise", supervise)
    command = ["-c", "import sys; sys.exit(sys.argv[2:4] != ['generate', '@'])"]
    child = lambda name, words, env: LocalChild(name, [*command, *words[1:]], env)  # noqa: E731
    monkeypatch.setattr("verifiers_rl.cli.supervise.LocalChild", child)
    port = ("--trainer.args.vllm_server_port", str(free_port()))
    assert generate("-o", "new.jsonl", "--inference.gpus", "0", *port)[0] == 0
    (plan,) = started
    assert plan.is_needed and plan.max_restarts == 0
    assert "--enable-lora" not in plan.command("h", 1)
