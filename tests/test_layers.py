"""How files and keys of the command line become one configuration."""

import argparse
import re
import tomllib
from datetime import date
from pathlib import Path

import pytest

from tests.helpers import ROOT
from verifiers_rl.cli.config import (
    PARSER,
    RunConfig,
    add_run_options,
    load_run_config,
    parse_command_line,
    words_of,
)
from verifiers_rl.cli.layers import TomlError
from verifiers_rl.cli.plan import check_trainer_options
from verifiers_rl.sft.main import SFTRunConfig

BASE = """
model = "./model"
[env.taskset]
id = "number_guess"
num_tasks = 64
[inference.args]
max_model_len = 2048
[trainer.args]
max_steps = 5
lora_target_modules = ["q_proj", "v_proj"]
loss_args = { eps_high = 3.0 }
"""


def test_a_later_file_wins_and_tables_merge_key_by_key(compose, tmp_path):
    (tmp_path / "shared").mkdir()
    later = "[env.taskset]\nnum_tasks = 8\n[trainer.args]\nmax_steps = 7\nbatch_size = 32\n"
    config = compose(f'import_from = ["../shared"]\n{BASE}', later)
    assert config.trainer.args == {
        "max_steps": 7,
        "batch_size": 32,
        "lora_target_modules": ["q_proj", "v_proj"],
        "loss_args": {"eps_high": 3.0},
    }
    assert config.envs[0].v1 == {"taskset": {"id": "number_guess", "num_tasks": 8}}
    assert config.model == f"{tmp_path}/0/model"  # relative to the file that has it
    assert config.folders == [tmp_path / name for name in ("1", "0", "shared")]


def test_lists_and_arrays_of_tables_are_replaced(compose):
    later = '[[env]]\nid = "c"\n[trainer.args]\nlora_target_modules = ["o_proj"]\n'
    assert compose(BASE, later).trainer.args["lora_target_modules"] == ["o_proj"]
    # A table in place of an array, and the other way around, too.
    array = 'model = "m"\n[[env]]\nid = "a"\nweight = 2\n[[env]]\nid = "b"\n'
    for texts in ((array, later), (array, '[env]\nid = "c"\n'), (BASE, later)):
        assert [(env.id, env.weight) for env in compose(*texts).envs] == [("c", 1.0)]


def test_keys_of_the_command_line_win_over_all_files_and_the_last_one_over_all(compose):
    words = "--trainer.args.max_steps 10 --trainer.args.max_steps=11 --model ./here"
    config = compose(BASE, "[trainer.args]\nmax_steps = 7\n", words=words)
    assert config.trainer.args["max_steps"] == 11
    assert config.model == str(Path.cwd() / "here")  # relative to where the command is given


@pytest.mark.parametrize(
    "words, name, value",
    [
        ('run_name "42"', "run_name", "42"),  # a text of TOML
        ("use_lora False", "use_lora", False),
        ("deterministic", "deterministic", True),  # alone: true
        ("vllm_server_timeout -0.5", "vllm_server_timeout", -0.5),  # a number, not an option
        ("lora_target_modules q_proj v_proj", "lora_target_modules", ["q_proj", "v_proj"]),
        ('loss_args {"eps_high": 4.0}', "loss_args", {"eps_high": 4.0}),
        ("output_dir None", "output_dir", None),  # nothing, also where any text would do
        ("stop 2024-01-01 b", "stop", [date(2024, 1, 1), "b"]),  # each as if it stood alone
        ("max_steps ten", "max_steps", "ten"),  # refused later, as it stands
    ],
)
def test_a_value_of_the_command_line_is_one_of_toml_or_a_text(compose, words, name, value):
    key, *rest = words.split(" ", 1 if words[-1] in "}]" else -1)
    config = compose(BASE, words=[f"--trainer.args.{key}", *rest])
    given = config.trainer.args.get(name)
    assert given == value and type(given) is type(value)


def test_a_whole_table_of_the_command_line_replaces_and_its_keys_merge(compose):
    def args_of(*words):
        words = [f"--trainer.args.{word}" for word in words]
        words += ["--trainer.args.chat_template_kwargs={}", "--sampling.reasoning_effort=low"]
        return compose(BASE, "[sampling]\nenable_thinking = true\n", words=words).trainer.args

    assert args_of("loss_args={}")["loss_args"] == {}
    assert args_of('loss_args={"eps":2}', "loss_args.beta=1")["loss_args"] == {"eps": 2, "beta": 1}
    args = args_of("loss_args.beta=1")
    assert args["loss_args"] == {"eps_high": 3.0, "beta": 1}
    assert args["chat_template_kwargs"] == {"reasoning_effort": "low"}


EVALUATES = """
eval_strategy = "steps"
eval_steps = 5
eval_on_start = true
save_steps = 5
load_best_model_at_end = true
"""


@pytest.mark.parametrize(
    "words, gone, stay",
    [
        (
            "--eval_strategy no",
            {"eval_steps", "eval_on_start", "load_best_model_at_end"},
            {"max_steps", "loss_args"},
        ),
        ("--eval_strategy no --eval_strategy steps", set(), {"eval_steps"}),
        ("--save_strategy no", {"load_best_model_at_end"}, {"eval_steps"}),
        ("--num_train_epochs 2", {"max_steps"}, {"num_train_epochs"}),
        ("--num_train_epochs 2 --max_steps 7", set(), {"num_train_epochs", "max_steps"}),
    ],
)
def test_what_a_later_layer_makes_useless_is_left_out(compose, words, gone, stay):
    words = words.replace("--", "--trainer.args.")
    args = compose(BASE + EVALUATES, words=words).trainer.args
    assert not gone & args.keys() and stay <= args.keys()


def test_a_later_layer_leaves_servers_out_again(compose, monkeypatch):
    """Servers that run already, or the table of those that would be started."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    runs = BASE + 'vllm_servers = ["localhost:8000"]\n'
    with pytest.raises(TomlError, match=r"they run already, so \[inference\] and inf"):
        compose(runs)
    config = compose(runs, words="--trainer.args.vllm_servers none")
    assert config.inference.gpus == 1 and "vllm_servers" not in config.trainer.args
    assert compose(runs, words="--inference={}").inference.gpus == 0


@pytest.mark.parametrize(
    "first, later, words, problem",
    [
        ("", "seed = -1", "", r"/1/config\.toml: \[trainer\.args\] seed=-1"),
        (
            'loss = "reinforce"',
            "seed = 1",
            "",
            r"/0/config\.toml: \[trainer\.args\] loss_args of loss=",
        ),
        ("seed = 1", "", "seed -1", r"^the command line: \[trainer\.args\] seed=-1"),
        # What a later layer has is meant.
        ('eval_strategy = "no"', "eval_steps = -1", "", r"/1/config\.toml: .* eval_steps=-1"),
    ],
)
def test_an_error_names_the_file_that_has_the_value(compose, first, later, words, problem):
    words = f"--trainer.args.{words}" * bool(words)
    config = compose(BASE + first, f"[trainer.args]\n{later}", words=words)
    with pytest.raises(TomlError, match=problem):
        config.make_args(use_cpu=True)


def test_a_dash_in_a_key_of_the_command_line_means_an_underscore_but_not_in_a_whole_table(compose):
    words = ["--env.args.my-size", "3", "--env.args.limits", '{"my-key" = 1}']
    config = compose('model = "m"\n[env]\nid = "of_layers"\n[env.args]\n"a-b" = 2\n', words=words)
    assert config.envs[0].args == {"a-b": 2, "my_size": 3, "limits": {"my-key": 1}}


def test_words_are_files_behind_an_at_sign_options_of_the_program_or_keys_in_any_order(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(BASE)
    second.write_text("[trainer]\ngpus = 0\n")

    def parse(*words):
        parser = argparse.ArgumentParser(**PARSER)
        add_run_options(parser)
        parser.set_defaults(dry_run=True)  # without a look at the model
        return parse_command_line(parser, list(words))[1]

    words = ["--resume", "--trainer.args.run_name=a b", "@", str(first), "--sampling.stop", "c d"]
    config = parse(*words, "e", "@", str(second))
    assert config.layers.files == [first, second] and config.trainer.gpus == 0
    given = {"run_name": "a b", "stop": ["c d", "e"], "resume_from_checkpoint": True}
    assert given.items() <= config.trainer.args.items()
    assert parse(*words_of(config)) == config  # as processes of the run are given them
    with pytest.raises(TomlError, match=r"give one as `@ config.toml`"):
        parse("--resume")


TOMLS = [path for path in ROOT.rglob("examples/**/*.toml") if "outputs" not in path.parts]


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_toml_of_the_repository_is_a_valid_run(path, unknown_models):
    # With what is to be uncommented.
    text = re.sub(r"^# (loss\w* = )", r"\1", path.read_text(), flags=re.MULTILINE)
    kind = SFTRunConfig if "data" in tomllib.loads(text) else RunConfig
    check_trainer_options(load_run_config(path, kind=kind))
