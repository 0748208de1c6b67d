"""What we change inside `verifiers.v1`, when this module is imported."""

from __future__ import annotations

import inspect
import os
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verifiers.v1 import Client, MessageNode, runtimes
from verifiers.v1.interception import server as interception

from verifiers_rl.envs.v1_client import TokenClient, TokenClientConfig
from verifiers_rl.process.secret_names import is_secret

# verifiers 0.4.1 moves the runtime of this machine and names its class anew.
_MODULE, _CLASS = "verifiers.v1.runtimes.subprocess", "SubprocessRuntime"
if find_spec(_MODULE) is None:
    _MODULE, _CLASS = "verifiers.v1.runtimes.backends.subprocess", "SubprocessBackend"
local_runtime: Any = import_module(_MODULE)
_Runtime: Any = getattr(local_runtime, _CLASS)


# --- Nodes of a trace -----------------------------------------------------------------------------
# verifiers makes nodes by pydantic's `model_construct`, which inspects the signature of each
# `default_factory` every time. The signature of `list` is parsed from a docstring, so a node takes
# 0.3 to 0.8 ms. With a function of ours that has its signature it takes 0.02 ms.
#
# Not needed once pydantic remembers the signature, or verifiers makes its nodes otherwise.


def _new_list() -> list[Any]:
    return []


# `inspect.signature` returns this instead of looking it up.
_new_list.__signature__ = inspect.signature(_new_list)  # type: ignore[attr-defined]
for node_field in MessageNode.model_fields.values():
    if node_field.default_factory is list:
        node_field.default_factory = _new_list


# --- The runtime of this machine ------------------------------------------------------------------
# Not needed once verifiers 0.4.1 is the oldest: an agent's runtime may then be a class of ours, by
# `CustomRuntimeConfig(import_path=...)`.


class _OsWithoutSecrets:
    """The module `os` with an `environ` without secrets."""

    @property
    def environ(self) -> dict[str, str]:
        return {n: value for n, value in os.environ.items() if not is_secret(n, value)}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


# Hides secret environment variables from programs that the model writes, and from harnesses and
# tool servers on this machine. verifiers passes this process's environment on to them, without
# variables that are named like an API key. They still get what verifiers passes on explicitly:
# `runtime_env()` of a task, `env` and `forward_env` of a harness.
local_runtime.os = _OsWithoutSecrets()


class _LazyRuntime(_Runtime):
    """verifiers' runtime on this machine, which makes its folder when something first uses it. A
    rollout in our chat uses it only if its task does. To make and to remove a folder, which happens
    on another thread, takes a tenth of the time of a short rollout.
    """

    @cached_property
    def workdir(self) -> Path:
        folder = Path(self.info.id)
        folder.mkdir(parents=True, exist_ok=True)  # threads may use it first at the same time
        return folder

    async def start(self) -> None:
        self.info.id = str(local_runtime.CACHE_DIR / "runtimes" / "subprocess" / self.name)
        del self.workdir  # the None of its constructor

    def cleanup(self) -> None:
        self.__dict__.setdefault("workdir", None)  # nothing has used it, so there is none to remove
        super().cleanup()

    async def teardown(self) -> None:
        self.__dict__.setdefault("workdir", None)
        await super().teardown()


setattr(runtimes, _CLASS, _LazyRuntime)  # where verifiers looks the class up


# --- The client -----------------------------------------------------------------------------------
# Not needed once the configuration of a client can name its class.

_stock_resolve_client = interception.resolve_client


def _resolve_client(config: Any) -> Client:
    """Make a client from its configuration. verifiers' own function knows only two kinds."""
    if isinstance(config, TokenClientConfig):
        return TokenClient()
    return _stock_resolve_client(config)


interception.resolve_client = _resolve_client
