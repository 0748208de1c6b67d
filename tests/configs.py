"""Configurations without files; for processes that must not load torch."""

import tomllib
from pathlib import Path

from verifiers_rl.cli.config import read_layers
from verifiers_rl.cli.layers import Layers, Setting, leaves


def make_config(*lines):
    """The configuration of a file with a model, an environment, and these lines."""
    path = Path("/a/rl.toml")
    data = {"model": "m", "env": {"id": "e"}, **tomllib.loads("\n".join(lines))}
    settings = [Setting(key, value, str(path), key) for key, value in leaves(data)]
    return read_layers(Layers([path], ["@", str(path)], settings), checks_model=False)
