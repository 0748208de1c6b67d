"""The scripts under benchmarks/ run by hand. Here: that what they import is still there."""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers import ROOT

SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


def test_what_benchmarks_import_is_there():
    """By the text of modules, because importing vLLM takes half a minute."""
    for path in SCRIPTS:
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith(("verifiers_rl", "tests")):
                text = Path(find_spec(module).origin).read_text()
                for name in (alias.name for alias in node.names):
                    made = rf"^(?:(?:async )?def |class |    )?{name}\b|import .*\b{name}\b"
                    is_there = re.search(made, text, re.MULTILINE)
                    assert is_there or find_spec(f"{module}.{name}"), (path, name)


def test_the_ledger_says_when_a_target_was_reached(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    ledger = import_module("ledger")
    steps = [{"step_s": 2.0, "reward": n / 20, "env/exact_match": n / 20} for n in range(20)]
    row = dict.fromkeys(ledger.FIELDS, 0) | {"task": "demo", "name": "mine", "rollouts": 200}
    row |= ledger.curve_of(steps, "env/exact_match")
    assert ledger.reached(row, 0.075) == pytest.approx((6.0, 30.0))
    again = {**row, "seed": 1, "wall_s": [2 * s for s in row["wall_s"]]}
    ledger.write_rows(tmp_path / "rows.csv", [row, again, again])
    table = ledger.table_of(ledger.answers_of(ledger.read_rows(tmp_path / "rows.csv")))
    assert "demo, 0 steps, seconds to 0.6 exact_match: mine 40.5 +- 19.1 s." in table
