"""Tests of classic environments, which verifiers has before 0.4."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verifiers.legacy") else ["*.py"]
