"""`vf-rl --check`: two small steps of a run."""

import re
import tempfile
from pathlib import Path

import pytest

from tests.conftest import processes_of
from tests.helpers import names_of, run_python, write_model
from tests.test_e2e_train import words_of_run
from verifiers_rl.cli import rl
from verifiers_rl.cli.config import load_run_config
from verifiers_rl.report.run_folder import write_metrics


@pytest.fixture
def check_with(tmp_path, monkeypatch):
    """Checks a configuration whose run has this status and this mismatch in both steps."""
    write_model(tmp_path / "model")
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}/logs")

    def check_with(status=0, mismatch=0.001, num_steps=2):
        path = tmp_path / "rl.toml"
        path.write_text(
            'model = "./model"\n[env]\nid = "e"\n[inference]\ngpus = 0\n[trainer]\ngpus = 0\n'
            f'[trainer.args]\noutput_dir = "{tmp_path}/run"\nbatch_size = 64\nmax_steps = 500\n'
            'rollouts_per_example = 8\nlearning_rate = 3e-4\nreport_to = "tensorboard"\n'
        )

        def run(config):
            args = config.make_args(use_cpu=True, bf16=False)
            assert (args.max_steps, args.batch_size, args.report_to) == (2, 16, [])
            assert args.learning_rate == 3e-4
            folder = Path(args.output_dir)
            (folder / "logs").mkdir()
            (folder / "logs/inference.log").write_text("of the server")
            rows = [{"step": step, "mismatch_kl": mismatch} for step in (1, 2)][:num_steps]
            if num_steps is not None:
                write_metrics(folder, rows)
            return status

        monkeypatch.setattr(rl, "run_anywhere", run)
        return rl.check(load_run_config(path))

    return check_with


@pytest.mark.parametrize(
    "how, said",
    [
        ({"status": 3}, "to fix: status 3; the servers' output is in"),
        ({"mismatch": 0.3}, "to fix: mismatch_kl above 0.02: docs/mismatch.md"),
        ({"mismatch": float("nan")}, "to fix: mismatch_kl above 0.02"),
        ({"num_steps": 0}, "to fix: no step had a token to train on: all rewards of a group"),
    ],
)
def test_what_is_wrong_is_said_and_keeps_the_servers_logs(check_with, tmp_path, capsys, how, said):
    assert check_with(**how) == 1
    assert said in capsys.readouterr().out
    (log,) = (tmp_path / "logs").glob("*/*")
    assert log.read_text() == "of the server"
    assert names_of(tmp_path) == ["logs", "model", "rl.toml"]


def test_a_trainer_on_another_machine_has_said_how_the_check_went(check_with, tmp_path):
    (tmp_path / "run").mkdir()  # whose folder may be the only one that can be written
    assert check_with(num_steps=None) == 0 and not list((tmp_path / "run").iterdir())


@pytest.mark.e2e
def test_a_run_that_works_is_ok_and_leaves_nothing_behind(warm_start, tmp_path):
    # A short name: vLLM's sockets lie there, and their paths have 107 characters at most.
    with tempfile.TemporaryDirectory() as temporary:
        words = ["-m", "verifiers_rl.cli.rl", "--check", *words_of_run(tmp_path, warm_start)]
        done = run_python(*words, VF_RL_TEST=tmp_path, TMPDIR=temporary)
        assert not list(Path(temporary).glob("vf-rl-check-*"))
    pattern = r"vf-rl: step 1: reward .*mismatch_kl.*\n.*step 2: .*\nvf-rl: all is ok\n$"
    assert re.search(pattern, done.stdout)
    assert processes_of(tmp_path) == {} and not list(tmp_path.iterdir())
