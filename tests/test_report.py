"""`vf-rl report`, on the folder of a run, and what the examples expect."""

import json
import os
import tomllib

from pydantic import TypeAdapter

from tests.fake_run import write_fake_run
from tests.helpers import ROOT
from verifiers_rl import RLConfig
from verifiers_rl.cli import rl
from verifiers_rl.cli.report import Expected
from verifiers_rl.report.run_folder import read_metrics, read_run


def test_a_run_is_compared_and_only_a_missed_target_is_no_failure(tmp_path, run_main):
    run, file = tmp_path / "run", tmp_path / "expected.json"
    write_fake_run(run, 400, num_steps=40)  # with evaluations at steps 20 and 40
    last = read_metrics(run)[-1]["eval_reward"]

    def report(*values):
        names = ("step", "low", "high", "is_target")
        more = {"metric": "eval_reward", "note": "n"}
        file.write_text(json.dumps([dict(zip(names, value)) | more for value in values]))  # noqa: B905
        status, stdout, stderr = run_main(rl.main, "report", run, "--expect", file)
        return status, (stdout + stderr).splitlines()

    as_expected = [("last", last, last), (20, 7, 8, True)]
    status, lines = report(*as_expected)
    assert status == 0 and lines[1].endswith(f"-> {last:.3f} (step 40)")
    assert f"| eval_reward | 40 | {last:.3f} | {last:.3f} to {last:.3f} | n |" in lines
    assert lines[-1].endswith("| 7.000 to 8.000 | target: n |")
    status, lines = report(*as_expected, ("last", last + 0.01, 9), (40, 0, last - 0.01), (3, 0, 1))
    failures = [line for line in lines if line.endswith("| not as expected: n |")]
    assert status == 1 and failures == lines[-3:] and "| eval_reward | 3 | nan |" in failures[2]
    # A run whose last evaluation was not finite does not pass by the one before.
    with (run / "metrics.jsonl").open("a") as added:
        added.write('{"step": 41, "eval_reward": null}\n')
    status, lines = report(("last", last, last))
    assert status == 1 and "| eval_reward | 41 | nan |" in lines[-1]
    # Nor does what another program has written there, which is no number.
    for value in ('"0.5"', "[0.5]", "{}"):
        with (run / "metrics.jsonl").open("a") as added:
            added.write(f'{{"step": 42, "eval_reward": {value}}}\n')
        status, lines = report(("last", 0, 1))
        assert status == 1 and "| eval_reward | 42 | nan |" in lines[-1]
    for value in (None, "0.5", [1], float("nan")):
        status, lines = report(("last", value, 1))
        assert status == 1 and f"{file}: (0, 'low'): must be a " in lines[-1]


def test_what_is_no_regular_file_is_not_waited_for(tmp_path, run_main):
    os.mkfifo(tmp_path / "metrics.jsonl")
    status, _, error = run_main(rl.main, "report", tmp_path)
    assert status == 1 and f"{tmp_path}/metrics.jsonl: no file with rows; name another" in error
    os.mkfifo(tmp_path / "run.json")
    assert read_run(tmp_path) == {}


def test_each_recipe_says_what_to_expect_and_plays_all_tasks_that_are_kept_for_it():
    paths = [*(ROOT / "examples").glob("*/*.toml")]
    for path in paths:
        recipe = tomllib.loads(path.read_text())
        kept = recipe.get("env", {}).get("eval_taskset", {}).get("num_tasks", 0)
        played = recipe.get("trainer", {}).get("args", {}).get("eval_examples")
        assert kept <= (played or RLConfig.eval_examples), path
    for folder in {path.parent for path in paths}:
        files = [*folder.glob("expected*.json")]
        assert folder / "expected.json" in files
        for file in files:
            assert f"`{file.name}`" in (folder / "README.md").read_text()
            for one in TypeAdapter(list[Expected]).validate_json(file.read_bytes()):
                assert one.low <= one.high and one.metric.startswith("eval_")
                assert one.is_target == ("https://" in one.note)  # where it is from
