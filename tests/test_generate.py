"""`vf-rl generate` against an endpoint that answers as OpenAI's does."""

import argparse
import asyncio
import json
import resource
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from aiohttp import web

from tests.conftest import free_port
from tests.helpers import ROOT, make_tiny_model
from tests.serving import chat_reply, in_thread, serving
from verifiers_rl import RLConfig, WeightedEnv, env_from
from verifiers_rl.cli import supervise as supervise_module
from verifiers_rl.cli.children import LocalChild
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.cli.plan import SERVERS_VARIABLE, assign_gpus, plan_servers
from verifiers_rl.envs.played import PlayedEnvironment
from verifiers_rl.report.run_folder import WritingError
from verifiers_rl.sft import generate as module
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
    make_tiny_model().save_pretrained(tmp_path / "base")
    (tmp_path / "held.jsonl").write_text("")
    (tmp_path / "rl.toml").write_text(
        'model = "./base"\n[env.taskset]\nid = "reverse_text"\nnum_tasks = 3\ninstruction = ""\n'
        '[env.agent.harness]\nid = "null"\n[trainer]\ngpus = 0\n[trainer.args]\ntop_k = 5\n'
    )
    (tmp_path / "reverse_text.py").write_text(
        (ROOT / "examples" / "reverse_text" / "reverse_text.py").read_text()
    )
    return tmp_path / "rl.toml"


def test_rollouts_of_any_endpoint_become_data(rl_toml, tmp_path, capsys, monkeypatch, tokenizer):
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
        assert module.main(["@", str(rl_toml), *words.split()]) == 0
    rows = [json.loads(line) for line in (tmp_path / "data" / "new.jsonl").read_text().splitlines()]
    assert len(asked) == 6 and len(rows) == 2
    body, authorization = asked[0]
    assert (body["model"], body["top_k"], authorization) == ("m", 5, "Bearer secret")
    assert "min_p" not in body  # which no endpoint but vLLM's knows
    for row in rows:
        question, answer = row["messages"]
        assert answer["content"] == question["content"][::-1]
        assert answer["reasoning_content"] == "so" and "reasoning_details" not in answer
        assert (row["reward"], row["environment"], row["model"]) == (1.0, "reverse_text", "m")
        assert row["chat_template_kwargs"] == body["chat_template_kwargs"] == {"effort": "low"}
    assert [row["example"] for row in rows] == [0, 0]
    assert "2 of 6 rollouts written" in (out := capsys.readouterr().out)
    assert "1 left out, because a length limit cut a turn" in out
    # What it has written is data for vf-sft.
    made = Tokenization(tokenizer).of_rows(read_dataset(["data/new.jsonl"]), "it")
    assert len(made) == 2


def test_an_endpoint_that_refuses_all_requests_is_named_and_fails(
    rl_toml, tmp_path, capsys, monkeypatch
):
    keys = []

    async def refuse(request):
        keys.append(request.headers.get("Authorization"))
        return web.json_response({"error": {"message": "no such key"}}, status=401)

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with in_thread(serving(refuse)) as url, pytest.raises(SystemExit) as ended:
        module.main(["@", str(rl_toml), "--endpoint", f"{url}/v1", "m", "-o", "new.jsonl"])
    assert ended.value.code == 1 and not (tmp_path / "new.jsonl").exists()
    error = capsys.readouterr().err
    assert "no rollout succeeded" in error and "no such key" in error
    assert keys and "secret" not in " ".join(filter(None, keys))  # it is OpenAI's alone


@pytest.mark.parametrize(
    "words, problem",
    [
        ("-o held.jsonl", "holds held.jsonl already; choose another"),
        ("-o new.txt", "-o new.txt: must end in .jsonl"),
        ("-o new.jsonl -n 0", "--rollouts 0: must be an integer >= 1"),
        ("-o new.jsonl --api-key-var K", "without effect unless --endpoint is given"),
        (
            "-o new.jsonl --endpoint u m --api-key-var NONE",
            "--api-key-var NONE: the variable is not set",
        ),
    ],
)
def test_an_option_of_generate_that_cannot_work_is_named(rl_toml, capsys, words, problem):
    with pytest.raises(SystemExit) as ended:
        module.main(["@", str(rl_toml), *words.split()])
    assert ended.value.code == 1 and problem in capsys.readouterr().err


# --- Requests and rollouts ------------------------------------------------------------------------


def test_requests_to_our_server_have_all_sampling_options():
    """An option that is left out would have the value in the model's generation_config.json."""
    neutral = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    neutral |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    neutral |= {"include_stop_str_in_output": False, "chat_template_kwargs": {}}
    assert sampling_of(RLConfig(use_cpu=True), True) == neutral
    given = {"top_p": 0.9, "stop": ["."], "include_stop_str_in_output": True, "max_tokens": 9}
    args = RLConfig(use_cpu=True, sampling_mask=True, router_replay=True, **given)
    assert sampling_of(args, True) == neutral | given
    assert sampling_of(args, False) == {"temperature": 0.7, **given}


def made_of(play, num):
    """An environment of this many examples, each played by `await play(number)`."""

    async def played(split, number):
        return await play(number)

    async def nothing(): ...

    return SimpleNamespace(
        name="played", sizes=lambda split: [num], play=played, open=nothing, close=nothing
    )


ASKED = argparse.Namespace(split="train", examples=None, rollouts=1, min_reward=0.0)


def row_of(number):
    return {"example": number, "reward": 1.0}, False


def test_replies_that_the_tasks_own_prompt_has_are_written_as_prompt():
    said = [("user", "ab"), ("assistant", "ba"), ("user", "abc")]
    shots = [{"role": role, "content": text} for role, text in said]
    rows = [{"prompt": shots}, {"prompt": "abc"}]
    env = env_from(rows, lambda completion: 1.0)
    written = []

    async def reply(request):
        return completed("cba")

    async def run():
        async with serving(reply) as url:
            envs, at = [WeightedEnv(env, "it")], Endpoint(f"{url}/v1", "m", "KEY")
            (made,) = make_players(envs, RLConfig(use_cpu=True), at)
            await write_rows(made, ASKED, 1, written.append)

    asyncio.run(run())
    shown, plain = sorted(written, key=lambda row: row["example"])
    texts = [[one["content"] for one in shown[name]] for name in ("prompt", "completion")]
    assert texts == [["ab", "ba", "abc"], ["cba"]] and "messages" not in shown
    assert [one["content"] for one in plain["messages"]] == ["abc", "cba"]
    assert "prompt" not in plain


def test_a_reply_that_the_environment_writes_is_not_to_be_learned():
    said = [vf.UserMessage(content="1+1"), vf.AssistantMessage(content="2"),
            vf.AssistantMessage(content="Next."), vf.AssistantMessage(content="3")]  # fmt: skip
    nodes = [SimpleNamespace(message=m, sampled=n in (1, 3)) for n, m in enumerate(said)]
    trace = SimpleNamespace(
        reward=1.0, branches=[SimpleNamespace(nodes=nodes)], calls=[], stop_condition=None,
        is_timeout=False, agent=SimpleNamespace(name="solver"),
    )  # fmt: skip
    env = SimpleNamespace(name="it", _template=None, _context=SimpleNamespace(model="m"))
    row, is_cut = PlayedEnvironment._row(env, trace, 0)
    assert not is_cut
    assert [message.get("weight") for message in row["messages"]] == [None, None, 0, None]


def test_a_rollout_is_written_when_it_ends_not_behind_slower_ones():
    others, written = asyncio.Event(), []

    async def play(number):
        if number == 0:
            await others.wait()
        return [row_of(number)]

    def write(row):
        written.append(row["example"])
        if len(written) == 2:
            others.set()

    asyncio.run(asyncio.wait_for(write_rows(made_of(play, 3), ASKED, 3, write), 20))
    assert written == [1, 2, 0]


def test_a_full_disk_is_named_and_half_a_character_of_a_model_ends_nothing(tmp_path, monkeypatch):
    async def write_rows(player, options, num_at_once, write):
        for _ in range(3):
            write({"text": "\ud800" + "y" * 60})

    monkeypatch.setattr(module, "write_rows", write_rows)
    options = SimpleNamespace(output=tmp_path / "data.jsonl", min_reward=0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(WritingError, match=r"data\.jsonl cannot be written: .*; make room"):
            asyncio.run(module._write(options, 1, [SimpleNamespace(name="e")]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    first = options.output.read_text().splitlines()[0]
    assert json.loads(first) == {"text": "?" + "y" * 60}


@pytest.mark.parametrize("failing, num_played", [(500, 10), (9, 500)])
def test_if_the_first_rollouts_all_fail_the_others_are_not_tried(failing, num_played):
    played = []

    async def play(number):
        played.append(number)
        await asyncio.sleep(0)
        if number < failing:
            raise ValueError(f"no {number}")
        return [row_of(number)]

    writing = write_rows(made_of(play, 500), ASKED, 1, lambda row: None)
    if failing < 500:
        assert asyncio.run(writing)[1].startswith("491 of 500 rollouts written")
    else:
        with pytest.raises(GenerationError, match=r"'played': no rollout succeeded.*no 0"):
            asyncio.run(writing)
    assert num_played <= len(played) <= num_played + 2


# --- The server -----------------------------------------------------------------------------------


def test_all_gpus_are_the_servers_because_nothing_is_trained(rl_toml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    pairs = [("inference.gpus", "2"), ("inference.replicas", "2"), ("trainer.gpus", "4")]
    config = load_run_config(rl_toml, pairs)
    make_one_server(config)
    plans = plan_servers(config)
    assert assign_gpus(config, plans) == {"inference": "0,1,2,3", "trainer": ""}
    command = " ".join(plans[0].command("127.0.0.1", 8000))
    assert "--data-parallel-size 2" in command and "--tensor-parallel-size 2" in command


def test_it_runs_beside_a_server_in_place_of_a_trainer_and_ends_with_it(
    rl_toml, tmp_path, monkeypatch
):
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
    monkeypatch.setattr(module, "supervise", supervise)
    command = ["-c", "import sys; sys.exit(sys.argv[2:4] != ['generate', '@'])"]
    child = lambda name, words, env: LocalChild(name, [*command, *words[1:]], env)  # noqa: E731
    monkeypatch.setattr(supervise_module, "LocalChild", child)
    port = free_port()
    words = ["@", str(rl_toml), "-o", "new.jsonl", "--inference.gpus", "0"]
    assert module.main([*words, "--trainer.args.vllm_server_port", str(port)]) == 0
    (plan,) = started
    assert (plan.port, plan.is_needed, plan.max_restarts) == (port, True, 0)
    assert "--enable-lora" not in plan.command("h", 1)
