import json
import os
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.helpers import names_of, running_python
from verifiers_rl.report.run_folder import (
    RunFolderError,
    clear_run_folder,
    closing_lines,
    keep_others_out,
    newest_checkpoint,
    prepare_run_folder,
    read_run,
    write_manifest,
    write_run,
)


def save(folder, step):
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "adapter_model.safetensors").write_text("weights")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    write_manifest(checkpoint)
    return checkpoint


def prepare(folder, resume=None, overwrite=False, max_steps=10):
    return prepare_run_folder(
        SimpleNamespace(
            output_dir=str(folder),
            resume_from_checkpoint=resume,
            overwrite_output_dir=overwrite,
            max_steps=max_steps,
        )
    )


def write(folder, name, text=""):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def write_metrics(folder, *steps):
    write(folder, "metrics.jsonl", "".join(f'{{"step": {n}, "reward": 1}}\n' for n in steps))


@pytest.mark.parametrize(
    "write, found",
    [
        (lambda folder: None, ""),
        (lambda folder: write(folder, "inference.log"), ""),
        (lambda folder: write_metrics(folder, 0, 0), ""),
        (lambda folder: write_metrics(folder, 0, 1), r"\(metrics.jsonl\)"),
        (lambda folder: write(folder, "model-1-of-2.safetensors"), r"\(model-1-of-2.safetensors\)"),
        (lambda folder: save(folder, 5), r"\(checkpoint-5\)"),
    ],
)
def test_a_folder_with_a_run_is_refused_unless_it_is_resumed_or_overwritten(write, found, tmp_path):
    folder = tmp_path / "run"
    write(folder)
    before = sorted(tmp_path.rglob("*"))
    for resume in (None, False):
        said = f"{folder}.*{found}.*--resume.*--overwrite.*another"
        with pytest.raises(RunFolderError, match=said) if found else nullcontext():
            assert prepare(folder, resume) is None
    assert prepare(folder, overwrite=True) is None
    assert sorted(tmp_path.rglob("*")) == before  # nothing was made


def test_one_process_at_a_time_trains_in_a_folder(tmp_path):
    program = "import sys; from pathlib import Path; from verifiers_rl.report import run_folder; "
    program += "run_folder.keep_others_out(Path(sys.argv[1])); print(1, flush=True); input()"
    with running_python("-c", program, tmp_path) as other:
        assert other.stdout.readline() == "1\n"
        with pytest.raises(RunFolderError, match="another process trains in it"):
            keep_others_out(tmp_path)
    for _ in range(2):  # a second run of one script
        keep_others_out(tmp_path)


def test_the_newest_checkpoint_is_resumed_unless_another_is_named(tmp_path):
    assert newest_checkpoint(tmp_path / "none") is None
    for damage in (b'{"status": ', b"[1]", b"\xff{}", b"[" * 10**5):
        (tmp_path / "run.json").write_bytes(damage)
        assert read_run(tmp_path) == {}
    save(tmp_path, 5)
    ten = save(tmp_path, 10)
    assert newest_checkpoint(tmp_path) == prepare(tmp_path, True, max_steps=11) == ten
    older = tmp_path / "checkpoint-5"
    assert prepare(tmp_path, str(older)) == older


def test_a_checkpoint_that_is_none_is_refused(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RunFolderError, match=r"run' holds no check.*start without --resu"):
        prepare(folder, resume=True)
    write_metrics(folder, 1)
    with pytest.raises(RunFolderError, match=r"run' holds no check.*or anew with --overw"):
        prepare(folder, resume=True)
    with pytest.raises(RunFolderError, match=r"t-20': no checkpoint is.*run' is none"):
        prepare(folder, resume=f"{folder}/checkpoint-20")
    for name in ("x" * 300, "a\0b", "~nobody-of-this-name/a"):  # no file can have one of these
        with pytest.raises(RunFolderError, match=r"cannot resume from .*: no checkpoint is"):
            prepare(folder, resume=name)
    five = save(folder, 5)
    for other in (folder / "checkpoint-7", folder):  # the run's own folder is none either
        with pytest.raises(RunFolderError, match=rf"{other}': no .*; the newest .* is {five}"):
            prepare(folder, resume=str(other))


def test_a_checkpoint_of_another_run_starts_a_new_folder_only(tmp_path):
    other = save(tmp_path / "other", 5)
    assert prepare(tmp_path / "new", resume=str(other)) == other
    save(tmp_path / "new", 3)
    with pytest.raises(RunFolderError, match=r"other/checkpoint-5 belongs to another run"):
        prepare(tmp_path / "new", resume=str(other))


def test_what_contradicts_itself_is_refused(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(RunFolderError, match="leave one of them out"):
        prepare(tmp_path, resume=True, overwrite=True)
    (tmp_path / "run").write_text("")
    with pytest.raises(RunFolderError, match="run' is a file; choose another"):
        prepare(tmp_path / "run")


def test_overwriting_removes_the_run_and_nothing_else(tmp_path):
    elsewhere = save(tmp_path / "elsewhere", 8)
    folder = tmp_path / "run"
    save(folder, 5)
    os.symlink(elsewhere, folder / "checkpoint-8")
    write_metrics(folder, 1)
    ours = ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json")
    kept = ("train.py", "rl.toml", "inference.log", "checkpoint-notes.md", "data.json")
    for name in (*ours, *kept):
        (folder / name).write_text("")
    (folder / "merged").mkdir()
    write_run(folder, {"save_final": "merged"})
    clear_run_folder(folder)
    assert names_of(folder) == sorted(kept)
    assert (elsewhere / "adapter_model.safetensors").exists()
    assert prepare(folder) is None
    clear_run_folder(tmp_path / "none")


def test_overwriting_leaves_a_model_and_a_readme_that_no_run_wrote(tmp_path):
    names = ["README.md", "config.json", "model.safetensors"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "merged").mkdir()
    write_run(tmp_path, {"status": "failed"})  # before it saved its own
    clear_run_folder(tmp_path)
    assert names_of(tmp_path) == sorted([*names, "merged"])


def test_a_run_ends_with_its_rewards_and_its_model(tmp_path):
    rows = [{"step": 1, "reward": 0.25, "kl": None}, {"step": 4, "reward": 0.5}]
    rows += [{"step": 4, "eval_reward": None}]  # not a number
    lines = [*map(json.dumps, rows), '{"step": 5, "rew']  # of a killed process
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    look = f"look at it: vf-rl view {tmp_path}"
    assert closing_lines(tmp_path) == ["reward: 0.250 (step 1) -> 0.500 (step 4)", look]
    (tmp_path / "config.json").write_text("{}")
    assert closing_lines(tmp_path)[2:] == [f"model: {tmp_path}"]
    shutil.rmtree(tmp_path)
    assert closing_lines(tmp_path) == []
