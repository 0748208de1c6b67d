"""Makes an `Env` of `verifiers.v1` that can be played here, from what a user gives.

load_v1_environment   makes it from a TOML's table, or from an id alone
environment_of        makes it from a taskset, wherever its class is defined
with_local_chat           uses our chat where nobody chose another harness
describe              says who plays where, in one line
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import verifiers.v1 as vf
from pydantic import BaseModel, ValidationError
from verifiers.v1.utils import loaders
from verifiers.v1.utils.prime import ensure_prime_auth

from verifiers_rl.did_you_mean import did_you_mean
from verifiers_rl.envs.base import (
    InvalidEnvironmentError,
    beside,
    how_to_install,
    module_name,
)
from verifiers_rl.envs.local_tools import runs_here

logger = logging.getLogger(__name__)

IN_PROCESS = "verifiers_rl"  # id of `chat_harness.ChatHarness`
SCRIPT = ("__main__", "__mp_main__")  # names of the script that runs, here and in a worker
GLOBAL_DEFAULT = "bash"  # verifiers' harness if neither agent nor taskset names one


# --- From a TOML ----------------------------------------------------------------------------------


def load_v1_environment(table: Mapping[str, Any], *folders: Path) -> vf.Env:
    """Make the environment of a TOML's table. Its keys are `harness` (of the only agent),
    `eval_taskset`, and whatever else verifiers' `EnvConfig` takes.

    Args:
        folders: modules may be there, beside those that are installed.

    Raises:
        InvalidEnvironmentError: an id is not installed, or verifiers refuses a key or a value; one
            line names it.
    """
    for folder in reversed(folders):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        let_tool_servers_import_from(folder)
    table = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    of_evaluation = table.pop("eval_taskset", None)
    try:
        _check_ids(table, folders)
        if "harness" in table:
            roles = _roles(table)
            if "agent" not in roles:
                raise InvalidEnvironmentError(
                    "[env.harness] is the harness of the agent 'agent', and this environment has "
                    + f"{', '.join(map(repr, roles))}; write "
                    + ", ".join(f"[env.{role}.harness]" for role in roles)
                )
            agent = dict(table.get("agent", {}))
            table["agent"] = agent | {"harness": table.pop("harness")}
        env = loaders.load_environment(_resolve(table))
        if of_evaluation is not None:
            config = {"taskset": dict(table["taskset"]) | of_evaluation}
            env.eval_taskset = loaders.load_taskset(
                _resolve(table | config, "eval_taskset").taskset
            )
        return env
    except InvalidEnvironmentError:
        raise
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise InvalidEnvironmentError(
            f"cannot load the environment {_ids(table)}: {type(error).__name__}: {error}"
        ) from error


def let_tool_servers_import_from(folder: Path) -> None:
    """Add the folder to PYTHONPATH. Tool servers are processes that import the taskset's module."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, paths)])


def _ids(table: Mapping[str, Any]) -> str:
    taskset = table.get("taskset")
    taskset_id = taskset.get("id") if isinstance(taskset, dict) else taskset
    return f"{taskset_id!r}" + (f" with id={table['id']!r}" if table.get("id") else "")


def _config_type(table: Mapping[str, Any]) -> type[vf.EnvConfig]:
    return loaders.env_config_type(table["taskset"].get("id", ""), table.get("id", ""))


def _roles(table: Mapping[str, Any]) -> list[str]:
    fields = _config_type(table).model_fields
    return [name for name, info in fields.items() if isinstance(info.default, vf.AgentConfig)]


def _resolve(table: dict[str, Any], taskset_table: str = "taskset") -> vf.EnvConfig:
    try:
        return loaders.resolve_env_config(table)
    except ValidationError as error:
        raise InvalidEnvironmentError(_first_problem(error, table, taskset_table)) from error


def _first_problem(error: ValidationError, table: dict[str, Any], taskset_table: str) -> str:
    """Describe pydantic's first error in one line: the TOML's table, the key, what is wrong."""
    first = error.errors(include_url=False)[0]
    *path, key = [str(part) for part in first["loc"]] or [""]
    shown = [
        taskset_table if at == 0 and part == "taskset" else part for at, part in enumerate(path)
    ]
    where = ".".join(["env", *shown])
    if first["type"] == "extra_forbidden":
        return f"[{where}] has an unknown key {key!r}; {nearest(key, _known_keys(table, path))}"
    if first["type"] == "missing":
        return f"[{where}] lacks the key {key!r}"
    message = first["msg"].removeprefix("Value error, ")
    return f"[{where}] {key}={first['input']!r}: {message}" if key else f"[{where}]: {message}"


def _known_keys(table: dict[str, Any], path: list[str]) -> list[str]:
    """Return the keys of the table at this path of the environment's config."""
    models: list[type[BaseModel]] = [_config_type(table)]
    value: Any = table
    for part in path:
        value = value.get(part, {}) if isinstance(value, dict) else {}
        given = value.get("id") if isinstance(value, dict) else None
        if part == "taskset" and given:
            models = [loaders.taskset_config_type(given)]
        elif part == "harness":
            models = [loaders.harness_config_type(given or GLOBAL_DEFAULT)]
        else:
            fields = [m.model_fields[part] for m in models if part in m.model_fields]
            # Of several possible types, the path names the one tried ("runtime", "docker").
            models = [m for f in fields for m in _models_in(f.annotation)] or models
    return sorted({name for model in models for name in model.model_fields})


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def nearest(name: str, known: list[str]) -> str:
    """Return the hint at the end of an error about an unknown name."""
    return did_you_mean(name, known, f"known: {', '.join(known)}")


def _check_ids(table: Mapping[str, Any], folders: Sequence[Path]) -> None:
    """Import what the ids name.

    Raises:
        InvalidEnvironmentError: a module does not exist, or imports one that does not.
    """
    ids = [("taskset", table["taskset"].get("id"), "tasksets", loaders.import_taskset)]
    ids.append(("", table.get("id"), "envs", loaders.import_environment))
    for name, agent in [*table.items(), ("", table)]:
        harness = agent.get("harness") if isinstance(agent, dict) else None
        if isinstance(harness, dict):
            where = f"{name}.harness" if name else "harness"
            ids.append((where, harness.get("id"), "harnesses", loaders.import_harness))
    for where, plugin_id, group, import_plugin in ids:
        if isinstance(plugin_id, str) and plugin_id:
            dotted = f"env.{where}" if where else "env"
            _import(dotted, plugin_id, f"verifiers.v1.{group}", import_plugin, folders)


def _import(
    where: str,
    plugin_id: str,
    group: str,
    import_plugin: Callable[[str], ModuleType],
    folders: Sequence[Path],
) -> None:
    try:
        import_plugin(plugin_id)
    except ModuleNotFoundError as error:
        module = module_name(plugin_id)
        missing = getattr(error.__cause__, "name", None)
        if missing not in (None, module, f"{group}.{module}"):
            raise InvalidEnvironmentError(
                f"[{where}] id={plugin_id!r}: its module imports {missing!r}, which is missing"
            ) from error
        places = [*sys.modules[group].__path__, *map(str, folders)]
        known = sorted(found.name for found in pkgutil.iter_modules(places))
        everywhere = {*known, *(found.name for found in pkgutil.iter_modules())}
        hint = did_you_mean(module, everywhere, f"known: {', '.join(known)}")
        raise InvalidEnvironmentError(
            f"[{where}] id={plugin_id!r}: no module {module!r} is installed"
            f"{beside(folders)}; {how_to_install(plugin_id) or hint}"
        ) from error


# --- From a taskset -------------------------------------------------------------------------------

_numbers = itertools.count(1)


def environment_of(taskset: vf.Taskset) -> vf.Env:
    """Make the environment that plays this taskset object: the environment that the taskset's
    module exports, which its id alone would load, or else one agent.

    verifiers makes an environment from the id of a module that exports the taskset's class. A
    taskset may have neither id nor module: its class may be defined in the script that runs. So
    this taskset gets a module of its own. That module exports a class whose constructor returns the
    taskset, and the environment and the harness that are exported beside the taskset.

    Raises:
        InvalidEnvironmentError: several environments are exported beside the taskset, the taskset
            has no config, or the environment's config has keys without a default.
    """
    cls = type(taskset)
    if not isinstance(getattr(taskset, "config", None), vf.TasksetConfig):
        raise InvalidEnvironmentError(
            f"{cls.__name__} has no config; call super().__init__(config) in its __init__, with a "
            "vf.TasksetConfig"
        )
    beside = [c for c in _exported_beside(taskset) if issubclass(c, vf.Env | vf.Harness)]
    envs = [c for c in beside if issubclass(c, vf.Env)]
    if len(envs) > 1:
        raise InvalidEnvironmentError(
            f"{cls.__name__} is exported together with several environments "
            f"({', '.join(c.__name__ for c in envs)}), so pass one of them: its module exports the "
            f"taskset in __all__, and env={envs[0].__name__}(CONFIG(taskset={{'id': __name__}}))"
        )
    given = type(cls.__name__, (cls,), {"__new__": lambda _, config: taskset})
    module = ModuleType(f"verifiers_rl_given_{next(_numbers)}")
    exported = {f"{number}": c for number, c in enumerate([given, *beside])}
    vars(module).update(exported, __all__=list(exported))
    sys.modules[module.__name__] = module
    try:
        config = loaders.env_config_type(module.__name__)()
    except ValidationError as error:
        raise InvalidEnvironmentError(
            f"{cls.__name__} is played in {envs[0].__name__}, whose config has keys without a "
            f"default; pass the environment itself: {error}"
        ) from error
    own = taskset.config.model_copy(update={"id": module.__name__})
    return loaders.load_environment(config.model_copy(update={"taskset": own}))


def _exported_beside(taskset: vf.Taskset) -> list[type]:
    """Return the classes that the taskset's module exports: the module of its id, the module of its
    class, or a package around that. A script exports nothing, so every class that it defines
    counts.
    """
    cls = type(taskset)
    names = [cls.__module__.rsplit(".", n)[0] for n in range(cls.__module__.count(".") + 1)]
    if (plugin_id := taskset.config.id) and cls.__module__ not in SCRIPT:
        # Not for a class of the script that runs: the id may name the script, and the import would
        # run it again.
        try:
            names.insert(0, loaders.import_taskset(plugin_id).__name__)
        except ModuleNotFoundError:
            pass  # the id is the user's own choice, and no module
    own: list[type] = []
    for name in names:
        module = sys.modules.get(name)
        exported = _classes(module, getattr(module, "__all__", None) or ())
        if cls in exported:
            return exported
        if name == cls.__module__ and module is not None:
            own = exported or [
                c for c in _classes(module, vars(module)) if c.__module__ == cls.__module__
            ]
    return own


def _classes(module: Any, names: Any) -> list[type]:
    found = (getattr(module, name, None) for name in names if not name.startswith("_"))
    return [c for c in found if isinstance(c, type)]


def tool_servers(env: vf.Env, has_tools_here: bool) -> list[vf.Toolset]:
    """Return the toolsets that verifiers will start a process for.

    Args:
        has_tools_here: `local_tools.LocalTools` has those that can run in this process.
    """
    taskset = env.taskset
    toolsets = [*taskset.toolsets(taskset.config)]
    toolsets += type(taskset).task_type().toolsets(taskset.config.task)
    return [t for t in toolsets if not (t.config.url or (has_tools_here and runs_here(t)))]


def check_tool_servers(env: vf.Env, has_tools_here: bool) -> None:
    """Raise InvalidEnvironmentError for tools that need a process of their own and whose class is
    in the script that runs.
    """
    for toolset in tool_servers(env, has_tools_here):
        if type(toolset).__module__ == "__main__":
            name = type(toolset).__name__
            raise InvalidEnvironmentError(
                f"the tools {name} are defined in the script that runs, and are not called in this "
                "process (tools_in_process). A tool server is a process of its own, which runs the "
                f"module of its class; move {name} into a file beside the script, which ends in "
                f"`if __name__ == '__main__': {name}.run()`, and import it from there"
            )


# --- Who plays, and where -------------------------------------------------------------------------


def with_local_chat(env: vf.Env) -> vf.Env:
    """Return the environment with our chat, on this machine, for each agent in the `null` harness
    and for each agent for which neither author nor user chose a harness. verifiers would put the
    latter into `bash`, in a sandbox of verifiers' makers. Other harnesses stay; harmless ones also
    run on this machine, unless a runtime is set.
    """
    from verifiers_rl.envs.chat_harness import ChatHarnessConfig

    taskset_has_one = loaders.default_harness_id(env.config.taskset.id) != GLOBAL_DEFAULT
    changed = {}
    for role, harness in env.config.agent_harnesses().items():
        agent = getattr(env.config, role)
        default = type(agent).model_fields["runtime"].default
        is_default = agent.runtime.model_dump() == default.model_dump()
        update: dict[str, Any] = {}
        if agent.harness is None and not taskset_has_one:
            update["harness"] = ChatHarnessConfig()
        elif harness.id in ("null", IN_PROCESS):
            # Refuses what our chat has not, such as the compaction of verifiers 0.4.1's.
            given = harness.model_dump(exclude={"id"}, exclude_defaults=True)
            update["harness"] = ChatHarnessConfig(**given)
        fits_here = not type(env.taskset).task_type().NEEDS_CONTAINER
        if is_default and fits_here and (update or _is_harmless(harness.id)):
            update["runtime"] = vf.SubprocessConfig()
        if update:
            changed[role] = agent.model_copy(update=update)
    if not changed:
        return env
    played = copy.copy(env)
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


def _is_harmless(harness_id: str) -> bool:
    """Return whether a harness runs nothing that the model writes, and needs no container."""
    harness = loaders.harness_class(harness_id)
    return not (harness.EXECUTES_CODE or harness.NEEDS_CONTAINER)


def check_login(env: vf.Env) -> None:
    """Raise InvalidEnvironmentError for an agent in a remote sandbox whose key is missing."""
    for role, harness in env.config.agent_harnesses().items():
        if getattr(env.config, role).runtime.type != "prime":
            continue
        try:
            ensure_prime_auth()
        except SystemExit as error:
            raise InvalidEnvironmentError(
                f"the agent {role!r} plays in the harness {harness.id!r}, by verifiers' default in "
                f"a remote sandbox: {error}; or set a runtime, "
                f'[env.{role}.runtime] type = "docker" or, without isolation, "subprocess"'
            ) from error


def describe(env: vf.Env) -> str:
    """Describe who plays where."""
    homes: dict[str, list[str]] = {}
    for role, harness in env.config.agent_harnesses().items():
        runtime = getattr(env.config, role).runtime.type
        place = "on this machine" if runtime == "subprocess" else f"in {runtime}"
        home = (
            "in verifiers_rl's chat, in this process"
            if harness.id == IN_PROCESS
            else f"in the harness {harness.id!r}, {place}"
        )
        if harness.id == IN_PROCESS and _scores_by_programs(env):
            home += f"; its tasks' programs run {place}"
        homes.setdefault(home, []).append(role)
    agents = [
        f"the agents {', '.join(roles)} play {home}"
        if len(roles) > 1
        else f"the agent {'' if roles == ['agent'] else f'{roles[0]} '}plays {home}"
        for home, roles in homes.items()
    ]
    return (
        f"{type(env).__name__}, " if not isinstance(env, vf.SingleAgentEnv) else ""
    ) + "; ".join(agents)


def warn_of_plain_functions(env: vf.Env) -> None:
    """Warn of rewards and metrics that are not async: verifiers awaits what they return."""
    for name, function in inspect.getmembers(type(env.taskset).task_type(), inspect.isfunction):
        is_score = hasattr(function, "reward") or hasattr(function, "metric")
        if is_score and not inspect.iscoroutinefunction(inspect.unwrap(function)):
            logger.warning(
                "%s.%s is no `async def`, but verifiers awaits it: unless it returns an awaitable, "
                "each rollout ends in a TypeError",
                type(env.taskset).task_type().__name__,
                name,
            )


def _scores_by_programs(env: vf.Env) -> bool:
    """Return whether a reward or a metric of its tasks asks for the runtime."""
    task = type(env.taskset).task_type()
    return any(
        (hasattr(function, "reward") or hasattr(function, "metric"))
        and "runtime" in inspect.signature(function).parameters
        for _, function in inspect.getmembers(task, inspect.isfunction)
    )
