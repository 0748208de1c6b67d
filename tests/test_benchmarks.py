"""The scripts under benchmarks/ run by hand. Here: that what they import is still there."""

import ast
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.helpers import ROOT

FOLDER = ROOT / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


# Torch and transformers are imported once. Each benchmark is imported in a fork of its own, so
# that it has to import all else itself.
IMPORT = """
import os, sys, traceback
import torch, transformers

children = {}
for name in sys.argv[2:]:
    if (child := os.fork()) == 0:
        output = os.open(os.path.join(sys.argv[1], name), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 1
        try:
            __import__(name)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    children[child] = name
for child, name in children.items():
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The exit status and the errors of importing each benchmark."""
    folder = tmp_path_factory.mktemp("imported")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, str(folder), *NAMES],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split() for line in done.stdout.splitlines())
    return {name: (int(found[name]), (folder / name).read_text()) for name in NAMES}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own, while it is imported
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_finds_what_it_imports(imported, name):
    status, errors = imported[name]
    assert status == 0, errors[-3000:]
    # Those inside functions too.
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        module = getattr(node, "module", None) or ""
        if isinstance(node, ast.ImportFrom) and module.startswith(("verifiers_rl", "tests")):
            for alias in node.names:
                is_there = hasattr(import_module(module), alias.name)
                assert is_there or find_spec(f"{module}.{alias.name}"), (module, alias.name)


def test_the_gpu_of_weight_syncs_server_is_counted_among_the_visible_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    gpu = import_module("weight_sync").gpu
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert [gpu(0), gpu(1)] == ["5", "7"]
