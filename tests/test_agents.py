"""Agents that exist already, programs and functions, against a stand-in for vf-vllm. All sampled
tokens are to be trained: `play` looks at it.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import pytest
import verifiers.v1 as vf

from tests.conftest import is_running, wait_until
from tests.helpers import chat
from tests.test_env_workers import roll_out
from tests.test_environments_v1 import SECRETS, add_to_task, on_the_path, play  # noqa: F401
from tests.test_environments_v1 import tokenizer as tokenizer
from verifiers_rl import WeightedEnv, env_from_agent
from verifiers_rl.envs.agents import load_agent_environment
from verifiers_rl.envs.base import InvalidEnvironmentError

# It asks without openai, whose import takes a second.
ASK = """
import json, os, subprocess, sys, time, urllib.request

def ask(text, model="another", **options):
    options['model'] = model
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": text}]} | options).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
SLEEP = "subprocess.Popen(['sleep', '600']).pid"


def program(folder, text, *words):
    """An environment whose tasks a program of this text plays."""
    (folder / "agent.py").write_text(ASK + text)
    table = {"id": "small_tasks", "args": {"prompt": "a b; $HOME"}}
    table["command"] = [sys.executable, "agent.py", *words]
    return load_agent_environment(table, folder)


@pytest.fixture
def run(play, tmp_path, add_to_task):  # noqa: F811
    """Plays a rollout by a program. What it printed, the file that it left, and the requests."""

    def run(text, *words, say="yes", **options):
        @add_to_task
        @vf.metric
        async def seen(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
            found.append(trace.last_reply)
            found.append((await runtime.read("left")).decode())
            return 1.0

        found = []
        text = f"open('left', 'w').write('a file')\n{text}"
        (rollout,), requests = play(say, program(tmp_path, text, *words), **options)
        return *(found or [rollout.error]), requests

    return run


def test_a_program_gets_its_row_as_words_and_rewards_see_what_it_prints_and_leaves(run):
    text = "print(ask(sys.argv[1]), ask('again'), sys.argv[1:])"
    say = lambda prompt: "yes" if "again" in prompt else "no"  # noqa: E731
    printed, left, requests = run(text, "<{prompt}>", "{idx}${idx}", "{", say=say)
    assert printed == "no yes ['<a b; $HOME>', '0${idx}', '{']" and left == "a file"
    assert len(requests) == 2


def test_a_program_has_nothing_of_ours_in_its_environment(run, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    printed, _, _ = run("ask('?'); print(json.dumps({**os.environ, 'cwd': os.getcwd()}))")
    found = json.loads(printed)
    assert found["HOME"] == found["cwd"] and not Path(found["cwd"]).exists()
    known = {"PATH", "HOME", "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "cwd"}
    assert {*found} - {"LC_CTYPE"} == known  # which Python itself sets


def test_the_end_of_what_a_program_prints_is_kept(run):
    assert run("ask('?'); print('x' * 99_999 + 'y')")[0] == "x" * 65_534 + "y"


@pytest.mark.parametrize(
    "text, said",
    [
        ("ask('?'); sys.exit('no' * 2000 + ' luck')", "agent.py '{prompt}' ended with status 1: "),
        ("print('I am wise')", "the agent got no reply"),
        ("ask('?', n=2)", "HTTP Error 400"),
    ],
)
def test_a_program_that_fails_costs_its_rollout(run, text, said):
    error, _ = run(text, "{prompt}", fails=True, trains_all=False)
    assert said in str(error) and len(str(error)) < 2300


def test_a_program_that_fails_for_a_full_context_is_cut(play, tmp_path):  # noqa: F811
    text = "ask('first'); ask('x' * 9999)"
    (rollout,), requests = play("yes", program(tmp_path, text))
    assert rollout.is_truncated and len(requests) == len(rollout.samples) == 1


def test_a_program_and_what_it_has_started_end_with_the_rollout(run, tmp_path):
    pids = tmp_path / "pids"
    # One of them in a session of its own.
    away = SLEEP.replace("'600']", "'600'], start_new_session=True")
    tell = f"print({SLEEP}, {away}, os.getpid(), file=open({str(pids)!r}, 'a'))\n"
    run(f"ask('?')\n{tell}")  # `sleep` has its stdout, which does not end
    error, _ = run(f"{tell}time.sleep(600)", fails=True, generation_timeout=5.0)
    assert "longer than generation_timeout" in str(error)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 6
    wait_until(lambda: not any(map(is_running, started)))


def test_what_a_program_asks_for_does_not_change_how_it_is_sampled(run, caplog):
    own = "temperature=0.1, top_p=0.2, top_k=3, seed=4, max_tokens=2, max_completion_tokens=99"
    *_, ((body, _),) = run(f"ask('?', {own})", temperature=0.7, max_tokens=50)
    given = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_tokens": 50, "model": "m"}
    assert body | given == body and not {"seed", "max_completion_tokens"} & {*body}
    assert "samples with" not in caplog.text
    run("ask('?', response_format={'type': 'json_object'})")
    assert "samples with response_format={'type': 'json_object'}" in caplog.text


ROWS = [{"prompt": "start", "answer": "no", "unused": object()}]


def client_of(values):
    return openai.OpenAI(base_url=values["base_url"], api_key=values["api_key"]).chat.completions


def in_any_order(**values):
    """Streams, parallel calls, and calls that go on from one reply twice."""
    client, asked = client_of(values), chat(values["prompt"])

    def ask(messages):
        chunks = [*client.create(model="m", messages=messages, stream=True)]
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return [*messages, {"role": "assistant", "content": said}]

    with ThreadPoolExecutor() as pool:
        first, _ = pool.map(ask, [asked, asked])
        ends = pool.map(ask, [[*first, *chat(more)] for more in "abc"])
        return "".join(end[-1]["content"] for end in ends)


def test_a_column_that_a_row_lacks_is_left_to_the_default_of_the_agents_parameter():
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": "5"}]
    env = env_from_agent(rows, len_of, lambda prompt, model, answer="none": answer)
    given = [task.data.agent() for task in env]
    assert given == ["none", "5"]


def len_of(completion):
    return len(completion)


def test_a_function_asks_in_any_order_and_branches_become_samples(play):  # noqa: F811
    (rollout,), requests = play("yes and no", env_from_agent(ROWS, len_of, in_any_order))
    assert rollout.reward == len("yes and no") * 3
    assert len(requests) == rollout.num_turns == 5
    # The two first replies are alike: two of those that go on continue them, the third has its own.
    assert len(rollout.samples) == 3


async def call_a_tool(prompt, base_url, api_key):
    messages = chat(prompt)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        ask = partial(client.chat.completions.create, model="m", messages=messages)
        message = (await ask()).choices[0].message
        call_id = message.tool_calls[0].id
        messages += [message, {"role": "tool", "tool_call_id": call_id, "content": "8"}]
        await ask()  # the last reply is the answer


def test_tool_calls_of_an_async_function_are_one_sample(play):  # noqa: F811
    call = {"name": "double", "arguments": '{"x":4}'}
    say = lambda prompt: "done" if "<|tool|>8" in prompt else call  # noqa: E731
    (rollout,), _ = play(say, env_from_agent(ROWS, len_of, call_a_tool))
    assert rollout.reward == 4 and len(rollout.samples) == 1 and rollout.num_turns == 2


def leave(answer, **values):
    client_of(values).create(model="m", messages=chat("?"))
    if answer == "exit":
        exit()
    next(iter(answer))


def test_agents_play_in_rollout_workers(tmp_path, tokenizer, on_the_path):  # noqa: F811
    async def of_each(run, runner):
        return [(await run(number))[0] for number in range(4)]

    rows = [{"prompt": "start", "answer": answer} for answer in ("no", "exit", "")]
    function = env_from_agent(rows, len_of, leave)
    prints = program(tmp_path, "print(ask('?'))")
    agents = [WeightedEnv(function, "function"), WeightedEnv(prints, "program")]
    (well, exits, ends, of_program), _ = roll_out(agents, tokenizer, tmp_path, of_each)
    assert well.reward == of_program.reward == 3.0
    assert "SystemExit" in str(exits.error) and "StopIteration" in str(ends.error)


@pytest.mark.parametrize("words", [["bash", "-c"], ["nodejs", "--eval"], ["perl", "-wne"]])
def test_a_row_is_no_code(words):
    table = {"id": "small_tasks", "command": [*words, "print {prompt}", "{prompt}"]}
    with pytest.raises(InvalidEnvironmentError, match="behind the code, where it is data"):
        load_agent_environment(table)


def test_columns_that_there_are_not_are_named_at_the_start(tmp_path):
    with pytest.raises(InvalidEnvironmentError, match="'promt' is no column of the tasks: idx, "):
        program(tmp_path, "", "{promt}")
    with pytest.raises(InvalidEnvironmentError, match="'question', which is no column"):
        env_from_agent(ROWS, len_of, lambda question: "")
