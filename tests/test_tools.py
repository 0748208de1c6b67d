"""Tools of verifiers.v1 that are called in this process, in place of MCP server processes."""

import json
import os
import sys

import pytest
import verifiers.v1 as vf

from tests import test_environments_v1 as v1
from tests.test_environments_v1 import load
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.tools import LocalServer, LocalUrl, runs_here

tokenizer, on_the_path, play = v1.tokenizer, v1.on_the_path, v1.play  # fixtures


def calls(*names_and_arguments):
    """What the policy says: these tool calls one after the other, then the text of the prompt's
    last tool result.
    """

    def say(prompt):
        done = prompt.count("<|tool|>")
        if done < len(names_and_arguments):
            name, arguments = names_and_arguments[done]
            is_text = isinstance(arguments, str)
            return {"name": name, "arguments": arguments if is_text else json.dumps(arguments)}
        return prompt.split("<|tool|>")[-1].split("<|end|>")[0]

    return say


def tool_results(rollout):
    return [line[6:] for line in rollout.completion.splitlines() if line.startswith("tool: ")]


def test_a_rollout_has_a_toolset_of_its_own_which_is_set_up_and_closed(play):
    import many_tools

    many_tools.HAPPENED.clear()
    say = calls(("own_count", {}), ("own_count", {}), ("own_asked", {}))
    for rollout in play(say, load("many_tools"), index=1, num_rollouts=3)[0]:
        assert tool_results(rollout) == ["1", "2", "question 1"]
    assert many_tools.HAPPENED.count("setup") == many_tools.HAPPENED.count("closed") == 3


def test_state_is_that_of_the_calling_rollout(play):
    """Rollouts run at the same time, and each has two toolsets that write into its state."""
    say = calls(("note", {"text": "1"}), ("own_note", {"text": "2"}), ("note", {"text": "3"}))
    seen_by_shared_object = []
    for rollout in play(say, load("many_tools"), num_rollouts=4)[0]:
        assert rollout.metrics["notes"] == 123
        first, of_own, *_, last = tool_results(rollout)
        assert first.startswith("1 of ") and last.startswith("3 of ") and of_own == "1"
        seen_by_shared_object += [int(text.split()[-1]) for text in (first, last)]
    assert sorted(seen_by_shared_object) == list(range(1, 9))


def test_a_tool_that_fails_answers_the_model(play):
    wrong = [("own_fail", "[1]"), ("own_fail", "{"), ("own_halve", {})]
    say = calls(("own_fail", {"what": "ab"}), ("own_fail", {"times": "x"}), *wrong)
    (rollout,), _ = play(say, load("many_tools"))
    assert tool_results(rollout)[0] == "Error executing tool fail: 'abab'"
    assert "Field required" in rollout.completion and "valid integer" in rollout.completion
    assert tool_results(rollout)[-3:] == [
        "error: the arguments must be a JSON object, not [1]",
        "error: the arguments must be a JSON object, not '{'",
        "error: there is no tool 'own_halve'",
    ]


def test_a_tool_that_never_answers_or_ends_its_process_costs_the_rollout(play):
    env = load("many_tools", harness=v1.NULL | {"tool_timeout": 0.2})
    for name, said in (("own_hang", "did not answer within 0.2 s"), ("own_leave", "exit(3)")):
        (rollout,), _ = play(calls((name, {})), env, fails=True)
        assert said in str(rollout.error)


def test_toolsets_that_cannot_be_set_up_are_named(play, monkeypatch):
    import many_tools

    async def fail(self):
        raise ValueError("no database")

    monkeypatch.setattr(many_tools.Own, "setup", fail)
    (rollout,), requests = play(env=load("many_tools"), fails=True)
    assert "the tools 'own' were not set up: ValueError: no database" in str(rollout.error)
    assert not requests
    monkeypatch.setattr(many_tools.Pad, "setup", fail)
    with pytest.raises(Exception, match="the tools 'Pad' were not set up: ValueError: no data"):
        play(env=load("many_tools"))


def test_only_tools_that_need_no_server_run_here(on_the_path):
    from many_tools import Own, Pad
    from mcp.server.mcpserver import Context

    class Registers(Own):
        def register(self, mcp):
            super().register(mcp)

    class TakesContext(vf.Toolset[vf.ToolsetConfig]):
        @vf.tool
        async def log(self, context: Context) -> str:
            """Logs."""
            return ""

    TakesContext.log.__annotations__["context"] = Context
    docker = {"runtime": {"type": "docker"}}
    assert runs_here(Own(vf.ToolsetConfig())) and runs_here(Pad(vf.SharedToolsetConfig()))
    assert runs_here(Own(vf.ToolsetConfig(colocated=True, **docker)))
    assert not runs_here(Own(vf.ToolsetConfig(**docker)))
    assert not runs_here(Own(vf.ToolsetConfig(url="http://elsewhere/mcp")))
    assert not runs_here(Registers(vf.ToolsetConfig()))
    assert not runs_here(TakesContext(vf.ToolsetConfig()))


def test_the_object_of_a_task_is_not_that_of_a_rollout(on_the_path):
    """As with a process, only class and config of a toolset count; no rollout sees another's."""
    from many_tools import Own

    given = Own(vf.ToolsetConfig())
    given.num_calls = 7
    first, second = LocalServer(given), LocalServer(given)
    first.toolset.config.url = "changed"
    assert (first.toolset.num_calls, second.toolset.config.url) == (0, given.config.url)
    assert isinstance(LocalUrl(given), str) and LocalUrl(given).shared is None


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tool_is_called_here_or_in_the_process_of_its_server(play, monkeypatch, in_process):
    monkeypatch.setattr("verifiers_rl.envs.tools.runs_here", lambda _: in_process)
    say = calls(("double", {"x": 4}), ("process", {}))
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
    assert "the tool servers ['', 'own'] did not answer within 0 s" in str(rollout.error)


def test_tools_may_be_defined_in_the_script_that_runs(play, monkeypatch):
    from many_tools import Own

    monkeypatch.setattr(Own, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Own", Own, raising=False)
    (rollout,), _ = play(calls(("own_count", {})), load("many_tools"))
    assert tool_results(rollout) == ["1"]
    monkeypatch.setattr("verifiers_rl.envs.v1_loading.runs_here", lambda _: False)
    with pytest.raises(
        InvalidEnvironmentError,
        match=r"Own are defined in the script .* a process.*move Own into a file beside the script",
    ):
        play(env=load("many_tools"))
