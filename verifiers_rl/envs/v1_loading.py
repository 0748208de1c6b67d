"""Makes an `Env` of `verifiers.v1` that can be played here, and its tasks, from what a user gives.

load_v1_environment   makes it from a TOML's table
environment_of        makes it from a taskset, wherever its class is defined
with_local_chat       uses our chat where nobody chose another harness
describe              says who plays where, in one line
TaskStream            the tasks of a taskset without end, by their position
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.utils import loaders
from verifiers.v1.utils.prime import ensure_prime_auth

from verifiers_rl.data import ENDLESS
from verifiers_rl.envs.base import (
    HOW_TO_MAKE_PYTHON,
    InvalidEnvironmentError,
    add_folders,
    module_name,
)
from verifiers_rl.envs.chat_harness import IN_PROCESS, ChatHarnessConfig
from verifiers_rl.envs.tools import runs_here
from verifiers_rl.envs.v1_client import SAMPLING
from verifiers_rl.option_rules import did_you_mean

GLOBAL_DEFAULT = "bash"  # verifiers' harness if neither agent nor taskset names one
NUM_KEPT = 4096  # tasks of a stream in memory: more than the groups of all pending batches


# --- From a TOML ----------------------------------------------------------------------------------


def load_v1_environment(given: Mapping[str, Any], *folders: Path) -> vf.Env:
    """Make the environment of a table: [env] in a TOML, or the dict of a `WeightedEnv`.

    {"id": ..., "args": {...}}      a taskset, and keys of its config
    {"taskset": {"id": ...}, ...}   keys of verifiers' `EnvConfig`, and `eval_taskset`: what differs
                                    in the taskset of evaluations

    Args:
        folders: modules may be there, beside those that are installed.

    Raises:
        InvalidEnvironmentError: an id is not installed or is a classic environment's, or verifiers
            refuses a key or a value; one line names it.
    """
    add_folders(*folders)
    table = copy.deepcopy(dict(given))
    if "taskset" not in table:
        table["taskset"] = {"id": table.pop("id"), **table.pop("args", {})}
    of_evaluation = table.pop("eval_taskset", None)
    try:
        if "taskset" not in given:
            refuse_classic(given["id"])
        env = loaders.load_environment(_resolve(table))
        if of_evaluation is not None:
            config = _resolve(table | {"taskset": table["taskset"] | of_evaluation}, "eval_taskset")
            env.eval_taskset = loaders.load_taskset(config.taskset)
        return env
    except InvalidEnvironmentError:
        raise
    except ModuleNotFoundError as error:
        raise InvalidEnvironmentError(_describe_missing(error, folders)) from error
    except Exception as error:  # whatever the code of the environment raises
        raise InvalidEnvironmentError(
            f"cannot load the environment {table['taskset'].get('id')!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def refuse_classic(env_id: str) -> None:
    """Raise InvalidEnvironmentError if the module of an id has a classic environment."""
    found: Any = None
    with suppress(ModuleNotFoundError):  # what is missing is said when it is loaded
        found = importlib.import_module(module_name(env_id))
    if hasattr(found, "load_environment") and not hasattr(found, "__all__"):
        raise InvalidEnvironmentError(
            f"[env] id={env_id!r} is a classic environment, which needs an older verifiers; "
            f"{HOW_TO_MAKE_PYTHON} beside the id"
        )


def _resolve(table: dict[str, Any], taskset_table: str = "taskset") -> vf.EnvConfig:
    """Return verifiers' config of a table. Raises InvalidEnvironmentError with the TOML's table,
    the key, and what is wrong with it.
    """
    try:
        return loaders.resolve_env_config(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        *path, key = [str(part) for part in first["loc"]] or [""]
        names = [taskset_table, *path[1:]] if path[:1] == ["taskset"] else path
        where = f"[{'.'.join(['env', *names])}]"
        if first["type"] == "extra_forbidden":
            # Without this key, verifiers makes the config that it was given for.
            given = table
            for part in path:
                given = given.get(part, given)  # the path also has the names of types
            del given[key]
            config: Any = _resolve(table, taskset_table)
            for part in path:
                config = getattr(config, part, config)
            known = sorted(type(config).model_fields)
            hint = did_you_mean(key, known, f"known: {', '.join(known)}")
            said = f"has an unknown key {key!r}; {hint}"
        elif first["type"] == "missing":
            said = f"lacks the key {key!r}"
        else:
            message = first["msg"].removeprefix("Value error, ")
            said = f"{key}={first['input']!r}: {message}" if key else message
        raise InvalidEnvironmentError(f"{where} {said}") from error


def _describe_missing(error: ModuleNotFoundError, folders: tuple[Path, ...]) -> str:
    """Describe what verifiers says of an id whose module is missing, or imports one that is."""
    said = str(error).split(". ")[0]  # "taskset 'x' not found (tried to import 'x')"
    _, plugin_id, *_ = [*said.split("'"), ""]
    own = [f"{vf.__path__[0]}/{kind}" for kind in ("tasksets", "envs", "harnesses")]
    known = [module.name for module in pkgutil.iter_modules([*sys.path, *own])]
    hint = ""
    if module_name(plugin_id) not in known:  # else it imports what is missing
        hint = did_you_mean(plugin_id, known)
        if "/" in plugin_id:  # of verifiers' hub
            hint = f"install it: prime env install {plugin_id}"
    beside = f" nor beside the TOML in {', '.join(map(str, folders))}" if folders else ""
    return f"{said}{beside}: {error.__cause__ or error}" + (f"; {hint}" if hint else "")


# --- From a taskset -------------------------------------------------------------------------------


def environment_of(taskset: vf.Taskset) -> vf.Env:
    """Make the environment that plays this taskset object: the environment that the taskset's
    module exports, which its id alone would load, or else one agent.

    verifiers makes an environment from the id of a module that exports the taskset's class. A
    taskset may have neither id nor module: its class may be defined in the script that runs. So
    this taskset gets a module of its own. That module exports a class whose constructor returns the
    taskset, and the environment and the harness that are exported beside the taskset.

    Raises:
        ValueError: the taskset has no config, several environments are exported beside it, or the
            environment's config has keys without a default; then pass the environment itself.
    """
    cls = type(taskset)
    if not isinstance(getattr(taskset, "config", None), vf.TasksetConfig):
        raise InvalidEnvironmentError(
            f"{cls.__name__} has no config; call super().__init__(config) in its __init__, with a "
            "vf.TasksetConfig"
        )
    others = _exported_beside(cls)
    given = type(cls.__name__, (cls,), {"__new__": lambda _, config: taskset})
    module = ModuleType(f"verifiers_rl_given_{id(taskset)}")
    exported = {f"{number}": c for number, c in enumerate([given, *others])}
    vars(module).update(exported, __all__=list(exported))
    sys.modules[module.__name__] = module
    config = loaders.env_config_type(module.__name__)()
    own = taskset.config.model_copy(update={"id": module.__name__})
    return loaders.load_environment(config.model_copy(update={"taskset": own}))


def _exported_beside(cls: type) -> list[type]:
    """Return the environments and harnesses that are exported with a taskset's class, by its module
    or by the package around that. A script exports nothing, so all that it defines count.
    """
    name = cls.__module__
    own, around = sys.modules[name], sys.modules[name.partition(".")[0]]
    exporting = (m for m in (own, around) if cls.__name__ in getattr(m, "__all__", ()))
    if module := next(exporting, None):
        found = [getattr(module, n, None) for n in module.__all__]
    else:
        defined = ((n, c) for n, c in vars(own).items() if getattr(c, "__module__", "") == name)
        found = [c for n, c in defined if n[0] != "_"]
    return [c for c in found if isinstance(c, type) and issubclass(c, vf.Env | vf.Harness)]


# --- Who plays, and where -------------------------------------------------------------------------


def with_local_chat(env: vf.Env) -> vf.Env:
    """Return the environment with our chat, on this machine, for each agent in the `null` harness
    and for each agent for which neither author nor user chose a harness. verifiers would put the
    latter into `bash`, in a sandbox of verifiers' makers. Other harnesses stay; harmless ones also
    run on this machine, unless a runtime is set.

    Raises:
        InvalidEnvironmentError: an agent plays in a remote sandbox whose key is missing, or a name
            under its `sampling` is misspelt.
    """
    played = copy.copy(env)
    taskset_has_none = loaders.default_harness_id(env.config.taskset.id) == GLOBAL_DEFAULT
    needs_container = type(env.taskset).task_type().NEEDS_CONTAINER
    changed = {}
    for role, harness in env.config.agent_harnesses().items():
        agent = getattr(env.config, role)
        for name in dict(agent.sampling or {}).keys() - SAMPLING:  # vLLM ignores what it lacks
            if hint := did_you_mean(name, SAMPLING):
                raise InvalidEnvironmentError(f"[env.{role}.sampling] has no {name!r}; {hint}")
        update: dict[str, Any] = {}
        is_unchosen = agent.harness is None and taskset_has_none
        if is_unchosen or harness.id in ("null", "verifiers_rl", IN_PROCESS):
            # Refuses what our chat has not, such as the compaction of verifiers 0.4.1's.
            given = harness.model_dump(exclude_defaults=True)
            update["harness"] = ChatHarnessConfig(**given | {"id": IN_PROCESS})
        loaded = loaders.harness_class(harness.id)
        is_harmless = update or not (loaded.EXECUTES_CODE or loaded.NEEDS_CONTAINER)
        is_default = agent.runtime == type(agent).model_fields["runtime"].default
        if is_default and is_harmless and not needs_container:
            update["runtime"] = vf.SubprocessConfig()
        elif agent.runtime.type == "prime":
            try:
                ensure_prime_auth()
            except SystemExit as error:
                raise InvalidEnvironmentError(
                    f"the agent {role!r} plays in the harness {harness.id!r}, by verifiers' "
                    f"default in a remote sandbox: {error}; or set a runtime, "
                    f'[env.{role}.runtime] type = "docker" or, without isolation, "subprocess"'
                ) from error
        changed[role] = agent.model_copy(update=update)
    # Not the __init__ of its class, which may take more arguments, or reset later changes.
    vf.Env.__init__(played, env.config.model_copy(update=changed))
    played.taskset = env.taskset
    return played


def plays_in_our_chat_here(env: vf.Env) -> bool:
    """Return whether all agents play in our chat, on this machine."""
    return all(
        harness.id == IN_PROCESS and getattr(env.config, role).runtime.type == "subprocess"
        for role, harness in env.config.agent_harnesses().items()
    )


def check_tool_servers(env: vf.Env, has_tools_here: bool) -> None:
    """Raise InvalidEnvironmentError if verifiers would start a process for a toolset that is
    defined in the script that runs.

    Args:
        has_tools_here: those that can run in this process do.
    """
    taskset = env.taskset
    toolsets = [*taskset.toolsets(taskset.config)]
    toolsets += type(taskset).task_type().toolsets(taskset.config.task)
    servers = [t for t in toolsets if not (t.config.url or (has_tools_here and runs_here(t)))]
    if in_script := [type(t).__name__ for t in servers if type(t).__module__ == "__main__"]:
        raise InvalidEnvironmentError(
            f"the tools {in_script[0]} are defined in the script that runs, and are not called in "
            "this process. A tool server is a process of its own, which runs the module of its "
            f"class; move {in_script[0]} into a file beside the script, which "
            f"ends in `if __name__ == '__main__': {in_script[0]}.run()`, and import it from there"
        )


def describe(env: vf.Env) -> str:
    """Describe who plays where."""
    agents = []
    for role, harness in env.config.agent_harnesses().items():
        runtime = getattr(env.config, role).runtime.type
        where = f"the harness {harness.id!r}"
        if harness.id == IN_PROCESS:
            where = "verifiers_rl's chat in this process"
        place = "on this machine" if runtime == "subprocess" else f"in {runtime}"
        agents.append(f"{role} plays in {where}, with its programs {place}")
    kind = "" if isinstance(env, vf.SingleAgentEnv) else f"{type(env).__name__}, "
    return kind + "; ".join(agents)


# --- Tasks ----------------------------------------------------------------------------------------


class TaskStream:
    """The tasks that an iterator yields without end, by their position.

    Tasks are made when they are requested, on any thread, and the last `NUM_KEPT` are kept. An
    older task, or one that a resumed run requests, is made again with all tasks before it. So the
    iterator must yield the same tasks each time.

    Args:
        iterate: starts the iteration from the beginning.
    """

    def __init__(self, iterate: Callable[[], Iterator[vf.Task]]) -> None:
        self._iterate, self._tasks = iterate, iterate()
        self._num_made = 0  # by `_tasks`
        self._kept = deque[vf.Task](maxlen=NUM_KEPT)  # the last ones of these
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, position: int) -> vf.Task:
        """Return one task. Raises InvalidEnvironmentError if the stream ends before it."""
        with self._lock:
            if position < self._num_made - len(self._kept):
                self._tasks, self._num_made = self._iterate(), 0
                self._kept.clear()
            while position >= self._num_made:
                try:
                    self._kept.append(next(self._tasks))
                except StopIteration:
                    raise InvalidEnvironmentError(
                        f"the taskset is said to be infinite and ended after {self._num_made} tasks"
                    ) from None
                self._num_made += 1
            return self._kept[position - self._num_made]
