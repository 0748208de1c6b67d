"""The scripts under benchmarks/ run by hand. Here: that what they import is still there."""

import ast
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.helpers import ROOT, needs_classic

FOLDER = ROOT / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
COMPARES_WITH_CLASSIC = ("rollouts",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs_classic if n in COMPARES_WITH_CLASSIC else ()) for n in NAMES],
)
def test_a_benchmark_finds_what_it_imports(name):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Those inside functions too.
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        module = getattr(node, "module", None) or ""
        if isinstance(node, ast.ImportFrom) and module.startswith(("verifiers_rl", "tests")):
            for alias in node.names:
                is_there = hasattr(import_module(module), alias.name)
                assert is_there or find_spec(f"{module}.{alias.name}"), (module, alias.name)
