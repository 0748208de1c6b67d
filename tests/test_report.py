"""`vf-rl report`, on the folder of a run, and what the examples expect."""

import json
import tomllib

from pydantic import TypeAdapter

from tests.fake_run import write_fake_run
from tests.helpers import ROOT
from verifiers_rl import RLConfig
from verifiers_rl.cli import rl
from verifiers_rl.cli.report import Expected
from verifiers_rl.report.run_folder import metrics_file, read_metrics


def test_a_run_is_compared_and_only_a_missed_target_is_no_failure(tmp_path, run_main):
    run, file = tmp_path / "run", tmp_path / "expected.json"
    write_fake_run(run, 400, num_steps=40)  # with evaluations at steps 20 and 40
    last = read_metrics(metrics_file(run))[-1]["eval_reward"]

    def value(step, low, high, is_target=False):
        names = {"metric": "eval_reward", "step": step, "low": low, "high": high}
        return names | {"note": "n", "is_target": is_target}

    def report(*values):
        file.write_text(json.dumps(values))
        status, stdout, stderr = run_main(rl.main, "report", run, "--expect", file)
        return status, (stdout + stderr).splitlines()

    as_expected = [value("last", last, last), value(40, 0, 9), value(20, 7, 8, is_target=True)]
    status, lines = report(*as_expected)
    assert status == 0 and lines[0].startswith("reward: ")
    assert lines[1].endswith(f"-> {last:.3f} (step 40)")
    assert f"| eval_reward | 40 | {last:.3f} | {last:.3f} to {last:.3f} | n |" in lines
    assert lines[-1].endswith("| 7.000 to 8.000 | target: n |")
    outside = [value("last", last + 0.01, 9), value(40, 0, last - 0.01), value(3, 0, 1)]
    status, lines = report(*as_expected, *outside)
    failures = [line for line in lines if line.endswith("| not as expected: n |")]
    assert status == 1 and failures == lines[-3:]
    assert "| eval_reward | 3 | nan |" in failures[2]
    # A run whose last evaluation was not finite does not pass by the one before.
    with metrics_file(run).open("a") as added:
        added.write('{"step": 41, "eval_reward": null}\n')
    status, lines = report(value("last", last, last))
    assert status == 1 and "| eval_reward | 41 | nan |" in lines[-1]
    status, lines = report(value("end", 0, 1))
    assert status == 1 and "expected.json: (0, 'step'): must be" in lines[-1]


def test_evaluations_of_recipes_play_all_tasks_that_are_kept_for_them():
    for path in (ROOT / "examples").glob("*/*.toml"):
        recipe = tomllib.loads(path.read_text())
        kept = recipe.get("env", {}).get("eval_taskset", {}).get("num_tasks", 0)
        played = recipe.get("trainer", {}).get("args", {}).get("eval_examples")
        assert kept <= (played or RLConfig.eval_examples), path


def test_each_recipe_says_what_to_expect_and_names_the_source_of_targets():
    folders = {path.parent for path in (ROOT / "examples").glob("*/*.toml")}
    assert len(folders) > 10
    for folder in folders:
        files = [*folder.glob("expected*.json")]
        assert folder / "expected.json" in files
        for file in files:
            assert f"`{file.name}`" in (folder / "README.md").read_text()
            for one in TypeAdapter(list[Expected]).validate_json(file.read_bytes()):
                assert one.low <= one.high and one.metric.startswith("eval_")
                assert one.is_target == ("https://" in one.note)
