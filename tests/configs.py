"""Configurations without files; for processes that must not load torch."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verifiers_rl.cli.config import RunConfig, read_layers
from verifiers_rl.cli.layers import Layers, Setting, leaves


def make_config(tables: Mapping[str, Any] = MappingProxyType({})) -> RunConfig:
    """The configuration of a file with a model, an environment, and these tables."""
    path = Path("/a/rl.toml")
    data = {"model": "m", "env": {"id": "e"}, **tables}
    settings = [Setting(key, value, str(path), key) for key, value in leaves(data)]
    layers = Layers([path], ["@", str(path)], settings)
    return read_layers(layers, checks_model=False)
