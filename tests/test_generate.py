"""`vf-rl generate` against an endpoint that answers as OpenAI's does."""

import asyncio
import json
import threading

import pytest
from aiohttp import web

from tests.helpers import HAS_CLASSIC, ROOT, load_example, make_tiny_model, serving
from verifiers_rl.cli.generate import generate
from verifiers_rl.conversations import Tokenization, read_dataset

needs_v1 = pytest.mark.skipif(HAS_CLASSIC, reason="the TOML names a taskset of the default stack")


@pytest.fixture
def rl_toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny_model().save_pretrained(tmp_path / "base")
    (tmp_path / "held.jsonl").write_text("")
    (tmp_path / "rl.toml").write_text(
        'model = "./base"\n[env.taskset]\nid = "reverse_text"\nnum_tasks = 3\ninstruction = ""\n'
        '[env.harness]\nid = "null"\n[trainer]\ngpus = 0\n[trainer.args]\ntop_k = 5\n'
    )
    (tmp_path / "reverse_text.py").write_text(
        (ROOT / "examples" / "reverse_text" / "reverse_text.py").read_text()
    )
    return tmp_path / "rl.toml"


@needs_v1
def test_rollouts_of_any_endpoint_become_data(rl_toml, tmp_path, capsys, monkeypatch):
    asked = []

    async def reply(request):
        body = await request.json()
        asked.append((body, request.headers["Authorization"]))
        text = body["messages"][-1]["content"]
        # The first two rollouts are right, the third is cut, the others are wrong.
        number = len(asked)
        message = {"role": "assistant", "content": text[::-1] if number <= 3 else "no"}
        choice = {"index": 0, "message": message}
        choice["finish_reason"] = "length" if number == 3 else "stop"
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "m",
             "choices": [choice]}
        )  # fmt: skip

    ready, done = threading.Event(), threading.Event()
    urls = []

    async def serve():
        async with serving(reply) as url:
            urls.append(url)
            ready.set()
            await asyncio.to_thread(done.wait, 60)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        monkeypatch.setenv("MY_KEY", "secret")
        words = ["@", str(rl_toml), "-n", "2", "--min-reward", "1", "--base-url", f"{urls[0]}/v1"]
        words += ["--served-model", "m", "--api-key-var", "MY_KEY", "-o", "data/new.jsonl"]
        words += ["--trainer.args.max_concurrent", "1"]
        assert generate(words) == 0
    finally:
        done.set()
        thread.join(30)
    rows = [json.loads(line) for line in (tmp_path / "data" / "new.jsonl").read_text().splitlines()]
    assert len(asked) == 6 and len(rows) == 2
    body, authorization = asked[0]
    assert (body["model"], body["top_k"], authorization) == ("m", 5, "Bearer secret")
    for row in rows:
        question, answer = row["messages"]
        assert answer["content"] == question["content"][::-1]
        assert (row["reward"], row["environment"], row["model"]) == (1.0, "reverse_text", "m")
    assert [row["example"] for row in rows] == [0, 0]
    assert "2 of 6 rollouts written" in (out := capsys.readouterr().out)
    assert "1 left out, because a length limit cut a turn" in out
    # What it has written is data for vf-sft.
    tokenizer = load_example("warm_start").make_tokenizer()
    made = Tokenization(tokenizer).of_rows(read_dataset(["data/new.jsonl"]), "it")
    assert len(made.rows) == 2


@needs_v1
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-o", "held.jsonl"], "-o held.jsonl: is there already; choose another"),
        (["-o", "new.txt"], "-o new.txt: must end in .jsonl"),
        (["-o", "new.jsonl", "-n", "0"], "--rollouts 0: must be an integer >= 1"),
        (["-o", "new.jsonl", "--served-model", "m"], "give both, or none"),
    ],
)
def test_an_option_of_generate_that_cannot_work_is_named(rl_toml, capsys, words, problem):
    with pytest.raises(SystemExit) as ended:
        generate(["@", str(rl_toml), *words])
    assert ended.value.code == 1 and problem in capsys.readouterr().err
