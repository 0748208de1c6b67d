"""The scripts under benchmarks/ run by hand. Here: that what they import is still there."""

import ast
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.helpers import ROOT, run_python

SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


# Torch and transformers are imported once. Each benchmark is imported in a fork of its own, so
# that it has to import all else itself.
IMPORT = """
import os, sys
import torch, transformers

children = {}
for name in sys.argv[1:]:
    if (child := os.fork()) == 0:
        __import__(name)
        os._exit(0)
    children[child] = name
print([name for child, name in children.items() if os.waitpid(child, 0)[1]])
"""


@pytest.mark.slow
def test_each_benchmark_can_be_imported():
    words = ["-c", IMPORT, *(path.stem for path in SCRIPTS)]
    done = run_python(*words, folder=ROOT / "benchmarks")
    assert done.stdout.splitlines()[-1:] == ["[]"], (done.stdout, done.stderr[-3000:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own, while it is imported
def test_what_benchmarks_import_inside_functions_is_there():
    for path in SCRIPTS:
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith(("verifiers_rl", "tests")):
                for alias in node.names:
                    is_there = hasattr(import_module(module), alias.name)
                    assert is_there or find_spec(f"{module}.{alias.name}"), (path, alias.name)


def test_the_gpu_of_weight_syncs_server_is_counted_among_the_visible_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = import_module("weight_sync").gpu
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert [gpu(0), gpu(1)] == ["5", "7"]


def test_the_ledger_says_when_a_target_was_reached(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    ledger = import_module("ledger")
    steps = [{"step_s": 2.0, "reward": n / 20, "env/exact_match": n / 20} for n in range(20)]
    row = dict.fromkeys(ledger.FIELDS, 0) | {"task": "demo", "name": "mine", "rollouts": 200}
    row |= ledger.curve_of(steps, "env/exact_match")
    assert ledger.reached(row, 0.075) == pytest.approx((6.0, 30.0))
    again = {**row, "seed": 1, "wall_s": [2 * s for s in row["wall_s"]]}
    ledger.write_rows(tmp_path / "rows.csv", [row, again, again])
    rows = ledger.read_rows(tmp_path / "rows.csv")
    table = ledger.table_of(ledger.answers_of(rows))
    assert "demo, 0 steps, seconds to 0.6 exact_match: mine 40.5 +- 19.1 s." in table
    changed = {**rows[0], "idea": "loss=my_loss:fn my_loss=12345678"}
    assert ledger.newest_of([*rows, changed]) == [changed]


def test_the_ledger_scores_a_warm_start_as_its_server_takes_weights(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    ledger, made = import_module("ledger"), []

    def make_trainer(kind, task, options, *rest):
        made.append(ledger.TASKS[task] | options)

    monkeypatch.setattr(ledger, "make_trainer", make_trainer)
    monkeypatch.setattr(ledger, "held_out_score", lambda trainer, task: 0.25)
    for task in ledger.TASKS:
        model = tmp_path / task
        assert ledger.score_at_start(task, model, 1, tmp_path) == 0.25
        takes_adapters = "--enable-lora" in ledger.SERVER_FLAGS.get(task, [])
        assert takes_adapters <= made[-1].get("use_lora", True)
    assert len(made) == len(ledger.TASKS)


@pytest.mark.parametrize("idea, message", [
    ("--loss no.such:fn", "no.such:fn: there is no file of a module 'no.such'"),
    ("--class verifiers_rl:RLConfig", "class='verifiers_rl:RLConfig': must have a config_class"),
])  # fmt: skip
def test_an_idea_that_cannot_be_entered_is_one_line(run_main, monkeypatch, tmp_path, idea, message):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    ledger, folder = import_module("ledger"), ("--folder", tmp_path)
    said, *_ = run_main(ledger.main, "--name", "mine", *idea.split(), *folder)
    assert said.startswith(f"ledger.py: {message}") and "\n" not in said
