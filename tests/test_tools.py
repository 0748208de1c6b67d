"""Tools of verifiers.v1 that are called in this process, in place of MCP server processes."""

import os
import sys

import pytest
import verifiers.v1 as vf

from tests import test_environments_v1 as v1
from tests.test_environments_v1 import load
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.tools import runs_here

tokenizer, on_the_path, play = v1.tokenizer, v1.on_the_path, v1.play  # fixtures


def calls(*names_and_arguments):
    """What the policy says: these tool calls one after the other, then the text of the prompt's
    last tool result.
    """

    def say(prompt):
        done = prompt.count("<|tool|>")
        if done < len(names_and_arguments):
            return dict(zip(("name", "arguments"), names_and_arguments[done], strict=True))
        return prompt.split("<|tool|>")[-1].split("<|end|>")[0]

    return say


def tool_results(rollout):
    return [line[6:] for line in rollout.completion.splitlines() if line.startswith("tool: ")]


def test_a_rollout_has_a_toolset_of_its_own_which_is_set_up_and_closed(play):
    """Rollouts run at the same time. Two toolsets write into the state of the one that calls."""
    import many_tools

    many_tools.HAPPENED.clear()
    names = ("note", "own_note", "note", "own_count", "own_count", "own_asked")
    say = calls(*((name, f'{{"text": "{n}"}}') for n, name in enumerate(names, 1)))
    numbers_of_all = []
    for rollout in play(say, load("many_tools"), index=1, num_rollouts=4)[0]:
        assert rollout.metrics["notes"] == 123
        first, _, last, *of_own = tool_results(rollout)
        assert first.startswith("1 of ") and last.startswith("3 of ")
        assert of_own == ["1", "2", "question 1"]
        numbers_of_all += [int(text.split()[-1]) for text in (first, last)]
    assert sorted(numbers_of_all) == list(range(1, 9))
    assert many_tools.HAPPENED.count("setup") == many_tools.HAPPENED.count("closed") == 4


def test_a_tool_that_fails_answers_the_model(play):
    say = calls(
        ("own_fail", '{"what": "ab"}'), ("own_fail", '{"times": "x"}'), ("own_fail", "[1]"),
        ("own_fail", "{"), ("own_halve", "{}"),
    )  # fmt: skip
    (rollout,), _ = play(say, load("many_tools"))
    first, *_, no_object, no_json, no_tool = tool_results(rollout)
    assert first == "Error executing tool fail: 'abab'"
    assert "Field required" in rollout.completion and "valid integer" in rollout.completion
    assert no_object.endswith("must be a JSON object, not [1]") and no_json.endswith("not '{'")
    assert no_tool == "error: there is no tool 'own_halve'"


def test_a_tool_that_never_answers_ends_its_process_or_draws_costs_the_rollout(play):
    env = load("many_tools", harness=v1.NULL | {"tool_timeout": 0.2})
    for name, said in (
        ("own_hang", "did not answer within 0.2 s"),
        ("own_leave", "exit(3)"),
        ("own_draw", "the tool 'own_draw' returned image, and only text is trained"),
    ):
        (rollout,), _ = play(calls((name, "{}")), env, fails=True)
        assert said in str(rollout.error)


def test_toolsets_that_cannot_be_set_up_are_named(play, monkeypatch):
    import many_tools

    async def fail(self):
        raise ValueError("no database")

    said = "the tools '%s' were not set up: ValueError: no database"
    monkeypatch.setattr(many_tools.Own, "setup", fail)
    (rollout,), requests = play(env=load("many_tools"), fails=True)
    assert said % "own" in str(rollout.error) and not requests
    monkeypatch.setattr(many_tools.Pad, "setup", fail)
    with pytest.raises(Exception, match=said % "Pad"):
        play(env=load("many_tools"))


def test_only_tools_that_need_no_server_run_here(on_the_path):
    from many_tools import Own, Pad
    from mcp.server.mcpserver import Context

    class Registers(Own):
        def register(self, mcp):
            super().register(mcp)

    class TakesContext(Own):
        @vf.tool
        async def log(self, context: Context) -> None: ...

    docker = {"runtime": {"type": "docker"}}
    for toolset, is_here in (
        (Pad(vf.SharedToolsetConfig()), True),
        (Own(vf.ToolsetConfig(colocated=True, **docker)), True),
        (Own(vf.ToolsetConfig(**docker)), False),
        (Own(vf.ToolsetConfig(url="http://elsewhere/mcp")), False),
        (Registers(vf.ToolsetConfig()), False),
        (TakesContext(vf.ToolsetConfig()), False),
    ):
        assert runs_here(toolset) == is_here, toolset


def test_a_function_of_which_no_tool_can_be_made_is_named(on_the_path):
    from many_tools import Own

    class Underlined(Own):
        @vf.tool
        async def find(self, _limit: int) -> None: ...

    with pytest.raises(InvalidEnvironmentError, match=r"Underlined\.find: .*_limit"):
        runs_here(Underlined(vf.ToolsetConfig()))


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tool_is_called_here_or_in_the_process_of_its_server(play, monkeypatch, in_process):
    monkeypatch.setattr("verifiers_rl.envs.tools.runs_here", lambda _: in_process)
    say = calls(("double", '{"x": 4}'), ("process", "{}"))
    (rollout,), requests = play(say, load("glossary_like"))
    doubled, process = tool_results(rollout)
    assert doubled == "8" and (process == str(os.getpid())) == in_process
    assert requests[0][0]["tools"][0]["function"]["name"] == "double"


def test_tool_servers_that_do_not_answer_are_named(play, monkeypatch):
    from many_tools import ManyTask, Own

    elsewhere = Own(vf.ToolsetConfig(url="http://127.0.0.1:9/mcp"))
    monkeypatch.setattr(ManyTask, "toolsets", classmethod(lambda *_: [elsewhere]))
    monkeypatch.setattr("verifiers_rl.envs.tools.CONNECT_S", 0.0)
    (rollout,), _ = play(env=load("many_tools"), fails=True)
    assert "the tool servers ['', 'own'] did not answer" in str(rollout.error)


def test_tools_may_be_defined_in_the_script_that_runs(play, monkeypatch):
    from many_tools import Own

    monkeypatch.setattr(Own, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Own", Own, raising=False)
    play(calls(("own_count", "{}")), load("many_tools"))
    monkeypatch.setattr("verifiers_rl.envs.v1_loading.runs_here", lambda _: False)
    with pytest.raises(InvalidEnvironmentError, match="move Own into a file beside the script"):
        play(env=load("many_tools"))
