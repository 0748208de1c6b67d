"""`vf-rl report`, on the folder of a run, and what the examples expect."""

import json

import pytest
from pydantic import TypeAdapter

from tests.fake_run import write_fake_run
from tests.helpers import ROOT
from verifiers_rl.cli import rl
from verifiers_rl.cli.report import Expected
from verifiers_rl.report.run_folder import metrics_file, read_metrics

RECIPES = sorted({path.parent for path in (ROOT / "examples").glob("*/*.toml")})


@pytest.fixture
def report(tmp_path, run_main):
    """Writes a run with evaluations at steps 20 and 40, reports on it with these expectations, and
    returns the exit status, the lines and the run's last evaluation.
    """
    run, file = tmp_path / "run", tmp_path / "expected.json"
    write_fake_run(run, 400, num_steps=40)

    def report(expected):
        file.write_text(expected if isinstance(expected, str) else json.dumps(expected))
        status, stdout, stderr = run_main(rl.main, "report", run, "--expect", file)
        return status, (stdout + stderr).splitlines()

    report.last = read_metrics(metrics_file(run))[-1]["eval_reward"]
    return report


def value(step, low, high, **others):
    return {"metric": "eval_reward", "step": step, "low": low, "high": high, "note": "n"} | others


def test_a_run_within_its_bounds_passes_and_a_missed_target_is_only_shown(report):
    last = report.last
    missed = value(20, 7, 8, note="https://there", is_target=True)
    status, lines = report([value("last", last, last), missed])
    assert status == 0 and lines[0].startswith("reward: ")
    assert lines[1].endswith(f"-> {last:.3f} (step 40)")
    assert f"| eval_reward | 40 | {last:.3f} | {last:.3f} to {last:.3f} | n |" in lines
    assert "| 7.000 to 8.000 | target: https://there |" in lines[-2] and lines[-1] == ""


def test_each_value_outside_its_bounds_has_a_line_and_the_status_is_1(report):
    last = report.last
    below, none = value("last", last + 0.01, 9), value(3, 0, 1)
    status, lines = report([value(40, 0, 9), below, value("last", 0, last - 0.01), none])
    failures = [line for line in lines if line.startswith("not as expected: ")]
    assert status == 1 and len(failures) == 3
    assert f"{last + 0.01:.3f} to 9.000" in failures[0] and "eval_reward | 3 | nan" in failures[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "expected.json: (): Invalid JSON"),
        (json.dumps([value(0, 0, 1), value("end", 0, 1)]), "expected.json: (1, 'step'): must be"),
        (json.dumps([value(0, 0, 1, hight=2)]), "expected.json: (0, 'hight'): Extra inputs"),
    ],
)
def test_a_wrong_file_is_one_error(report, text, said):
    status, lines = report(text)
    assert status == 1 and said in lines[-1]


def test_a_folder_without_a_run_is_one_error(tmp_path, run_main):
    status, _, error = run_main(rl.main, "report", tmp_path)
    assert status == 1 and "metrics.jsonl: No such file" in error


@pytest.mark.parametrize("folder", RECIPES, ids=lambda path: path.name)
def test_each_recipe_expects_values_between_bounds_and_names_the_source_of_others(folder):
    files = sorted(folder.glob("expected*.json"))
    assert folder / "expected.json" in files
    for file in files:
        assert f"`{file.name}`" in (folder / "README.md").read_text()
        for one in TypeAdapter(list[Expected]).validate_json(file.read_bytes()):
            assert one.low <= one.high and one.metric.startswith("eval_")
            assert one.is_target == ("https://" in one.note)
