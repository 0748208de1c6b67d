"""Tools of verifiers.v1 that are called in this process, in place of MCP server processes."""

import json
import os
import sys

import pytest
import verifiers.v1 as vf

from tests import test_environments_v1 as v1
from tests.test_environments_v1 import check_tokens, load, play
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.tools import LocalServer, LocalUrl, runs_here

tokenizer, on_the_path = v1.tokenizer, v1.on_the_path  # fixtures
ROOM = {"max_tokens": 200, "max_seq_len": 2000}


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


def test_a_rollout_has_a_toolset_of_its_own_which_is_set_up_and_closed(tokenizer, tmp_path):
    import many_tools

    many_tools.HAPPENED.clear()
    say = calls(("own_count", {}), ("own_count", {}), ("own_asked", {}), ("own_process", {}))
    rollouts, requests = play(
        load("many_tools"), tokenizer, tmp_path, say, index=1, num_rollouts=3, **ROOM
    )
    for rollout in rollouts:
        assert rollout.error is None, rollout.error
        assert tool_results(rollout) == ["1", "2", "question 1", str(os.getpid())]
    assert many_tools.HAPPENED.count("setup") == many_tools.HAPPENED.count("closed") == 3
    check_tokens(rollouts, requests)


def test_state_is_that_of_the_calling_rollout(tokenizer, tmp_path):
    """Rollouts run at the same time, and each has two toolsets that write into its state."""
    say = calls(("note", {"text": "1"}), ("own_note", {"text": "2"}), ("note", {"text": "3"}))
    rollouts, _ = play(load("many_tools"), tokenizer, tmp_path, say, num_rollouts=4, **ROOM)
    seen_by_shared_object = []
    for rollout in rollouts:
        assert rollout.error is None, rollout.error
        assert rollout.metrics["notes"] == 123
        first, of_own, *_, last = tool_results(rollout)
        assert first.startswith("1 of ") and last.startswith("3 of ") and of_own == "1"
        seen_by_shared_object += [int(text.split()[-1]) for text in (first, last)]
    assert sorted(seen_by_shared_object) == list(range(1, 9))


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_tool_that_fails_answers_the_model(tokenizer, tmp_path, is_interrupted):
    if is_interrupted:
        env = load("many_tools", harness=v1.NULL | {"tool_timeout": 0.2})
        for name, said in (("own_hang", "did not answer within 0.2 s"), ("own_leave", "exit(3)")):
            (rollout,), _ = play(env, tokenizer, tmp_path, calls((name, {})), **ROOM)
            assert said in str(rollout.error) and not rollout.samples
        return
    wrong = [("own_fail", "[1]"), ("own_fail", "{"), ("own_halve", {})]
    say = calls(("own_fail", {"what": "ab"}), ("own_fail", {"times": "x"}), *wrong)
    (rollout,), _ = play(load("many_tools"), tokenizer, tmp_path, say, **ROOM)
    assert rollout.error is None, rollout.error
    assert tool_results(rollout)[0] == "Error executing tool fail: 'abab'"
    assert "Field required" in rollout.completion and "valid integer" in rollout.completion
    assert tool_results(rollout)[-3:] == [
        "error: the arguments must be a JSON object, not [1]",
        "error: the arguments must be a JSON object, not '{'",
        "error: there is no tool 'own_halve'",
    ]


def test_toolsets_that_cannot_be_set_up_are_named(tokenizer, tmp_path):
    own = load("many_tools", options={"task": {"own": {"fails": "setup"}}})
    (rollout,), requests = play(own, tokenizer, tmp_path, calls(), **ROOM)
    assert "the tools 'own' were not set up: ValueError: no database" in str(rollout.error)
    assert not requests
    shared = load("many_tools", options={"shared_fails": True})
    with pytest.raises(Exception, match="the tools 'Failing' were not set up: ValueError: no data"):
        play(shared, tokenizer, tmp_path, calls(), **ROOM)


def test_two_tools_of_one_name_are_an_error(tokenizer, tmp_path):
    env = load("many_tools", options={"task": {"twice": True}})
    (rollout,), _ = play(env, tokenizer, tmp_path, calls(), **ROOM)
    assert "declared both" in str(rollout.error)  # verifiers' own check: two without a prefix


def test_only_tools_that_need_no_server_run_here(on_the_path):
    from many_tools import Own, OwnConfig, Pad

    class Registers(Own):
        def register(self, mcp):
            super().register(mcp)

    assert runs_here(Own(OwnConfig())) and runs_here(Pad(vf.SharedToolsetConfig()))
    assert runs_here(Own(OwnConfig(colocated=True, runtime={"type": "docker"})))
    assert not runs_here(Own(OwnConfig(runtime={"type": "docker"})))
    assert not runs_here(Own(OwnConfig(url="http://elsewhere/mcp")))
    assert not runs_here(Registers(OwnConfig()))


def test_a_tool_that_takes_mcps_context_needs_a_server(on_the_path):
    from mcp.server.mcpserver import Context

    class Logs(vf.Toolset[vf.ToolsetConfig]):
        @vf.tool
        async def log(self, context: Context) -> str:
            """Logs."""
            return ""

    Logs.log.__annotations__["context"] = Context
    assert not runs_here(Logs(vf.ToolsetConfig()))


def test_the_object_of_a_task_is_not_that_of_a_rollout(on_the_path):
    """As with a process, only class and config of a toolset count; no rollout sees another's."""
    from many_tools import Own, OwnConfig

    given = Own(OwnConfig())
    given.num_calls = 7
    first, second = LocalServer(given), LocalServer(given)
    first.toolset.config.fails = "changed"
    assert (first.toolset.num_calls, second.toolset.config.fails) == (0, "")
    assert isinstance(LocalUrl(given), str) and LocalUrl(given).shared is None


@pytest.mark.slow
def test_tools_in_process_decides_whether_there_is_a_process(tokenizer, tmp_path):
    for tools_in_process in (True, False):
        options = ROOM | {"tools_in_process": tools_in_process}
        env = load("glossary_like")
        say = calls(("double", {"x": 4}))
        (rollout,), requests = play(env, tokenizer, tmp_path, say, **options)
        assert rollout.error is None and tool_results(rollout) == ["8"], rollout.error
        check_tokens([rollout], requests)
        say = calls(("own_process", {}))
        (rollout,), _ = play(load("many_tools"), tokenizer, tmp_path, say, **options)
        assert (tool_results(rollout) == [str(os.getpid())]) == tools_in_process


def test_tools_may_be_defined_in_the_script_that_runs(tokenizer, tmp_path, monkeypatch):
    from many_tools import Own

    monkeypatch.setattr(Own, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Own", Own, raising=False)
    say = calls(("own_count", {}))
    (rollout,), _ = play(load("many_tools"), tokenizer, tmp_path, say, **ROOM)
    assert rollout.error is None and tool_results(rollout) == ["1"]
    with pytest.raises(
        InvalidEnvironmentError,
        match=r"Own are defined in the script .*_process.*move Own into a file beside the script",
    ):
        play(load("many_tools"), tokenizer, tmp_path, say, tools_in_process=False, **ROOM)
