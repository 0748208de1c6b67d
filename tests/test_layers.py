"""How files and keys of the command line become one configuration."""

import argparse
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers import ROOT
from verifiers_rl.cli.config import (
    PARSER,
    RunConfig,
    add_run_options,
    check_trainer_args,
    load_run_config,
    make_importable,
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
    later = "[env.taskset]\nnum_tasks = 8\n[trainer.args]\nmax_steps = 7\nbatch_size = 32\n"
    config = compose(BASE, later)
    assert config.trainer.args["max_steps"] == 7 and config.trainer.args["batch_size"] == 32
    assert config.trainer.args["lora_target_modules"] == ["q_proj", "v_proj"]
    assert config.envs[0].v1 == {"taskset": {"id": "number_guess", "num_tasks": 8}}
    assert config.model == str(tmp_path / "0" / "model")  # relative to the file that has it
    assert config.folders == [tmp_path / "1", tmp_path / "0"]


def test_lists_and_arrays_of_tables_are_replaced(compose):
    later = '[[env]]\nid = "c"\n[trainer.args]\nlora_target_modules = ["o_proj"]\n'
    first = 'model = "m"\n[[env]]\nid = "a"\nweight = 2\n[[env]]\nid = "b"\n'
    config = compose(first, later)
    assert [(env.id, env.weight) for env in config.envs] == [("c", 1.0)]
    assert config.trainer.args["lora_target_modules"] == ["o_proj"]
    # A table in place of an array, and the other way around.
    table, one = '[env]\nid = "c"\n', '[[env]]\nid = "c"\n'
    for config in (compose(first, table), compose('model = "m"\n[env]\nweight = 2\n', one)):
        assert [(env.id, env.weight) for env in config.envs] == [("c", 1.0)]


def test_keys_of_the_command_line_win_over_all_files_and_the_last_one_over_all(compose):
    words = "--trainer.args.max_steps 10 --trainer.args.max_steps=11 --inference.gpus 0 "
    words += "--env.taskset.num-tasks 3 --model ./here "
    words += "--inference.args.max-model-len 32"  # dashes are underscores
    config = compose(BASE, "[trainer.args]\nmax_steps = 7\n", words=words)
    assert config.trainer.args["max_steps"] == 11 and config.inference.gpus == 0
    assert config.envs[0].v1["taskset"]["num_tasks"] == 3
    assert config.inference.args == {"max_model_len": 32}
    assert config.model == str(Path.cwd() / "here")  # relative to where the command is given


def test_items_of_an_array_have_numbers_on_the_command_line(compose):
    text = 'model = "m"\n[[env]]\nid = "a"\n[[env]]\nid = "b"\nargs = { x = 1 }\n'
    config = compose(text, words="--env.1.weight 3 --env.1.args.y two --env.0.id c")
    assert [(env.id, env.weight, env.args) for env in config.envs] == [
        ("c", 1.0, {}), ("b", 3, {"x": 1, "y": "two"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ('run_name "42"', "run_name", "42"),  # a text of TOML
        ("use_lora False", "use_lora", False),
        ("deterministic", "deterministic", True),  # alone: true
        ("learning_rate 1e-3", "learning_rate", 1e-3),
        ("vllm_server_timeout -0.5", "vllm_server_timeout", -0.5),  # a number, not an option
        ("lora_target_modules q_proj v_proj", "lora_target_modules", ["q_proj", "v_proj"]),
        ("lora_target_modules all-linear", "lora_target_modules", "all-linear"),
        ('lora_target_modules ["q_proj"]', "lora_target_modules", ["q_proj"]),
        ("stop ###", "stop", "###"),  # RLConfig makes a list of it
        ('loss_args {"eps_high": 4.0}', "loss_args", {"eps_high": 4.0}),
        ("loss_args {eps_high=4.0}", "loss_args", {"eps_high": 4.0}),
        ("max_tokens none", "max_tokens", None),
        ("output_dir None", "output_dir", None),  # also where any text would do
        ("loss_args none", "loss_args", None),
        ("gradient_masks {}", "gradient_masks", {}),
        ("max_steps ten", "max_steps", "ten"),  # refused later, as it stands
    ],
)
def test_a_value_of_the_command_line_is_one_of_toml_or_a_text(compose, words, name, value):
    key, *rest = words.split(" ", 1 if words[-1] in "}]" else -1)
    config = compose(BASE, words=[f"--trainer.args.{key}", *rest])
    check_trainer_args(config)
    assert config.trainer.args[name] == value
    assert type(config.trainer.args[name]) is type(value)


@pytest.mark.parametrize(
    ("words", "masks", "loss_args"),
    [
        ("gradient_masks={}", {}, {"eps_high": 3.0}),
        ("loss_args={} loss=ppo", {"ipo": {}}, {}),
        ('loss_args={"eps":2} loss_args.beta=1', {"ipo": {}}, {"eps": 2, "beta": 1}),
        ("loss_args.beta=1", {"ipo": {}}, {"eps_high": 3.0, "beta": 1}),
    ],
)
def test_a_whole_table_of_the_command_line_replaces_and_its_keys_merge(
    compose, words, masks, loss_args
):
    words = [f"--trainer.args.{word}" for word in words.split()]
    words += ["--trainer.args.chat_template_kwargs={}", "--sampling.reasoning_effort=low"]
    flat = "[sampling]\nenable_thinking = true\n"
    config = compose(BASE + "gradient_masks = { ipo = {} }\n", flat, words=words)
    check_trainer_args(config)
    args = config.trainer.args
    assert (args["gradient_masks"], args["loss_args"]) == (masks, loss_args)
    assert args["chat_template_kwargs"] == {"reasoning_effort": "low"}


EVALUATES = """
eval_strategy = "steps"
eval_steps = 5
eval_on_start = true
save_steps = 5
load_best_model_at_end = true
"""


def test_evaluations_that_a_later_layer_switches_off_take_their_options_along(compose):
    config = compose(BASE + EVALUATES, words="--trainer.args.eval_strategy no")
    check_trainer_args(config)
    config.make_args(use_cpu=True)  # nothing is refused
    gone = {"eval_steps", "eval_on_start", "load_best_model_at_end"}
    assert not gone & config.trainer.args.keys()
    assert {"max_steps", "loss_args"} <= config.trainer.args.keys()
    words = "--trainer.args.eval_strategy no --trainer.args.eval_strategy steps"
    assert compose(BASE + EVALUATES, words=words).trainer.args["eval_steps"] == 5


@pytest.mark.parametrize(
    ("texts", "where"),
    [
        (['eval_strategy = "no"\neval_steps = -1\n'], "/0/"),
        (['eval_strategy = "no"\n', "eval_steps = -1\n"], "/1/"),
    ],
)
def test_what_the_same_layer_or_a_later_one_has_is_meant_and_refused(compose, texts, where):
    first, *later = texts
    config = compose(BASE + first, *(f"[trainer.args]\n{text}" for text in later))
    with pytest.raises(TomlError, match=rf"{where}config\.toml: .* eval_steps=-1"):
        config.make_args(use_cpu=True)


def test_servers_that_run_already_can_be_left_out_again(compose, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    text = BASE + 'vllm_servers = ["localhost:8000"]\n'
    config = compose(text, words="--trainer.args.vllm_servers none")
    assert config.inference.gpus == 1 and not config.trainer.args["vllm_servers"]


def test_a_table_of_servers_is_taken_back_beside_servers_that_run_already(compose):
    words = ["--trainer.args.vllm_servers", '["a:1"]']
    with pytest.raises(TomlError, match=r"they run already, so \[inference\] has no effect"):
        compose(BASE, words=words)
    assert compose(BASE, words=[*words, "--inference={}"]).inference.gpus == 0


def test_an_error_names_the_file_that_has_the_value(compose):
    later = "[trainer.args]\nlearning_rate = -1.0\n"
    with pytest.raises(TomlError, match=r"/1/config\.toml: \[trainer\.args\] learning_rate=-1\.0"):
        compose(BASE, later).make_args(use_cpu=True)
    with pytest.raises(TomlError, match=r"/0/config\.toml: \[trainer\.args\] loss_args of loss="):
        compose(BASE.replace("eps_high", "eps"), later.replace("-", "")).make_args(use_cpu=True)
    with pytest.raises(TomlError, match=r"^the command line: \[trainer\.args\] seed=-1: must be"):
        compose(BASE, words="--trainer.args.seed -1").make_args(use_cpu=True)
    # A key that no file has: all files are named.
    with pytest.raises(TomlError, match=r"/0/config\.toml, \S+/1/config\.toml: model is missing"):
        compose('[env]\nid = "a"\n', "[trainer]\ngpus = 0\n")


def test_modules_are_found_beside_every_file_and_in_further_folders(compose, tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "of_layers.py").write_text("def mine(inputs): ...\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = BASE.replace("loss_args", "gradient_masks").replace(
        "eps_high = 3.0", '"of_layers:mine" = {}'
    )
    config = compose('import_from = ["../shared"]\n' + text, "[trainer]\ngpus = 0\n")
    assert config.folders == [tmp_path / "1", tmp_path / "0", tmp_path / "shared"]
    make_importable(config.folders)
    config.make_args(use_cpu=True).complete_loss(None)


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
        parser.add_argument("-s", "--session")
        add_run_options(parser)
        parser.set_defaults(dry_run=True)  # without a look at the model
        return parse_command_line(parser, list(words))

    options, config = parse(
        *("--resume", "--trainer.args.run_name=a b", "@", str(first), "--sampling.stop", "c d"),
        *("e", "-s", "name", "--trainer.args.vllm_server_timeout", "-0.5", f"@{second}"),
    )
    assert options.session == "name" and config.trainer.args["resume_from_checkpoint"] is True
    assert config.layers.files == [first, second] and config.trainer.gpus == 0
    given = {"run_name": "a b", "stop": ["c d", "e"], "vllm_server_timeout": -0.5}
    assert given.items() <= config.trainer.args.items()
    _, again = parse(*words_of(config))  # as processes of the run are given them
    assert again == config
    with pytest.raises(TomlError, match=r"give one as `@ config.toml`"):
        parse("--resume")
    with pytest.raises(SystemExit):
        parse("@")


TOMLS = [
    path for path in sorted(ROOT.rglob("*.toml"))
    if path.name != "pyproject.toml"
    and not any(part.startswith(".") or part in ("_build", "outputs")
                for part in path.relative_to(ROOT).parts)
]  # fmt: skip


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_toml_of_the_repository_is_a_valid_run(path, monkeypatch):
    # The model is made or downloaded later.
    monkeypatch.setattr("verifiers_rl.cli.config.model_error", lambda model: None)
    kind = SFTRunConfig if "data" in tomllib.loads(path.read_text()) else RunConfig
    check_trainer_options(load_run_config(path, kind=kind))
