"""How files and keys of the command line become one configuration."""

import argparse
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers import ROOT
from verifiers_rl.cli import train
from verifiers_rl.cli.config import (
    PARSER,
    RunConfig,
    add_run_options,
    check_trainer_args,
    load_run_config,
    make_importable,
    overrides_of,
    parse_command_line,
)
from verifiers_rl.cli.layers import TomlError, parse_value
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


@pytest.fixture
def compose(tmp_path):
    """Writes files, each into a folder of its own, and loads them under these words."""

    def compose(*texts, words=""):
        files = []
        for number, text in enumerate(texts):
            files.append(tmp_path / str(number) / "config.toml")
            files[-1].parent.mkdir(exist_ok=True)
            files[-1].write_text(text)
        words = words.split() if isinstance(words, str) else words
        return load_run_config(files, overrides_of(words), checks_model=False)

    return compose


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


def test_a_flag_is_replaced_and_dashes_of_the_command_line_are_underscores(compose):
    config = compose(BASE, "[inference.args]\nmax_model_len = 64\n")
    assert config.inference.args == {"max_model_len": 64}
    words = "--inference.args.max-model-len 32"
    assert compose(BASE, words=words).inference.args == {"max_model_len": 32}


def test_keys_of_the_command_line_win_over_all_files_and_the_last_one_over_all(compose, tmp_path):
    words = "--trainer.args.max_steps 10 --trainer.args.max_steps=11 --inference.gpus 0 "
    words += "--env.taskset.num-tasks 3 --trainer.args.loss_args.eps_high 2.5 --model ./here"
    config = compose(BASE, "[trainer.args]\nmax_steps = 7\n", words=words)
    assert config.trainer.args["max_steps"] == 11 and config.inference.gpus == 0
    assert config.envs[0].v1["taskset"]["num_tasks"] == 3
    assert config.trainer.args["loss_args"] == {"eps_high": 2.5}
    assert config.model == str(Path.cwd() / "here")  # relative to where the command is given


def test_items_of_an_array_have_numbers_on_the_command_line(compose):
    text = 'model = "m"\n[[env]]\nid = "a"\n[[env]]\nid = "b"\nargs = { x = 1 }\n'
    config = compose(text, words="--env.1.weight 3 --env.1.args.y two")
    assert [(env.id, env.weight, env.args) for env in config.envs] == [
        ("a", 1.0, {}), ("b", 3, {"x": 1, "y": "two"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10), ("1e-5", 1e-5), ("true", True), ('"10"', "10"), ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}), ('{"a": 1}', {"a": 1}), ('["a"]', ["a"]), ("word", "word"),
        ("True", True), ("False", False), ("org/model", "org/model"), ("a = 1", "a = 1"),
        ("1\nb = 2", "1\nb = 2"), ("", ""),
    ],
)  # fmt: skip
def test_a_word_is_a_value_of_toml_or_json_or_itself(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("run_name 42", "run_name", "42"),  # declared as text
        ("run_name=a b", "run_name", "a b"),
        ("use_lora False", "use_lora", False),
        ("tools_in_process", "tools_in_process", True),  # alone: true
        ("learning_rate 1e-3", "learning_rate", 1e-3),
        ("warmup_steps 2", "warmup_steps", 2),
        ("vllm_server_timeout -0.5", "vllm_server_timeout", -0.5),  # a number, not an option
        ("lora_target_modules q_proj v_proj", "lora_target_modules", ["q_proj", "v_proj"]),
        ("lora_target_modules all-linear", "lora_target_modules", "all-linear"),
        ('lora_target_modules ["q_proj"]', "lora_target_modules", ["q_proj"]),
        ("stop ###", "stop", "###"),  # RLConfig makes a list of it
        ("stop 42", "stop", "42"),
        ("report_to wandb trackio", "report_to", ["wandb", "trackio"]),
        ('loss_args {"eps_high": 4.0}', "loss_args", {"eps_high": 4.0}),
        ("loss_args {eps_high=4.0}", "loss_args", {"eps_high": 4.0}),
        ("env_workers 2", "env_workers", 2),
        ("eval_strategy steps", "eval_strategy", "steps"),
        ("max_tokens none", "max_tokens", None),
        ("hub_model_id none", "hub_model_id", None),  # also where any text would do
        ("output_dir None", "output_dir", None),
        ("report_to none", "report_to", None),
        ("loss_args none", "loss_args", None),
        ("gradient_masks none", "gradient_masks", None),
        ("gradient_masks {}", "gradient_masks", {}),
        ("run_name True", "run_name", "True"),
        (
            "chat_template_kwargs.enable_thinking False",
            "chat_template_kwargs",
            {"enable_thinking": False},
        ),
        ("max_steps ten", "max_steps", "ten"),  # refused later, as it stands
    ],
)
def test_a_value_of_the_command_line_has_the_type_of_its_option(compose, words, name, value):
    key, _, rest = words.partition(" ")
    option = f"--trainer.args.{key}" + ("" if "=" not in key else f" {rest}")
    given = [option] if "=" in key else [option, *rest.split()]
    if rest.startswith(("{", "[")):
        given = [option, rest]
    config = compose(BASE, words=given)
    check_trainer_args(config)
    assert config.trainer.args[name] == value
    assert type(config.trainer.args[name]) is type(value)


def test_a_whole_table_of_the_command_line_replaces_and_its_keys_merge(compose):
    text = BASE + "gradient_masks = { ipo = {} }\n"
    for words, masks, loss_args in (
        ("gradient_masks={}", {}, {"eps_high": 3.0}),
        ("loss_args={} loss=ppo", {"ipo": {}}, {}),
        ("loss_args=none loss=ppo", {"ipo": {}}, None),
        ('loss_args={"eps":2}', {"ipo": {}}, {"eps": 2}),
        ('loss_args={"eps":2} loss_args.beta=1', {"ipo": {}}, {"eps": 2, "beta": 1}),
        ("loss_args.beta=1", {"ipo": {}}, {"eps_high": 3.0, "beta": 1}),
    ):
        config = compose(text, words=[f"--trainer.args.{word}" for word in words.split()])
        check_trainer_args(config)
        args = config.trainer.args
        assert (args["gradient_masks"], args["loss_args"]) == (masks, loss_args), words
        if args.get("loss") == "ppo":
            config.make_args(use_cpu=True).make_loss()


@pytest.mark.parametrize(
    ("words", "kwargs"),
    [
        ("--trainer.args.chat_template_kwargs {}", {}),
        ("--trainer.args.chat_template_kwargs.b 2", {"enable_thinking": True, "b": 2}),
        (
            "--trainer.args.chat_template_kwargs {} --sampling.reasoning_effort low",
            {"reasoning_effort": "low"},
        ),
    ],
)
def test_a_whole_table_also_replaces_what_the_flat_layout_has_set(compose, words, kwargs):
    flat = 'model = "m"\n[[env]]\nid = "e"\n[sampling]\nenable_thinking = true\n'
    assert compose(flat, words=words).trainer.args["chat_template_kwargs"] == kwargs


def test_servers_that_run_already_can_be_left_out(compose, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    text = BASE + 'vllm_servers = ["localhost:8000"]\n'
    for words in ("--trainer.args.vllm_servers none", "--trainer.args.vllm_servers=None"):
        config = compose(text, words=words)
        assert config.inference.gpus == 1 and not config.trainer.args["vllm_servers"]
    without = text.replace("[inference.args]\nmax_model_len = 2048\n", "")
    assert compose(without).inference.gpus == 0


EVALUATES = (
    'eval_strategy = "steps"\neval_steps = 5\neval_on_start = true\nsave_steps = 5\n'
    "load_best_model_at_end = true\n"
)


@pytest.mark.parametrize(
    ("text", "word", "gone"),
    [
        (EVALUATES, "eval_strategy no", "eval_steps eval_on_start load_best_model_at_end"),
        (EVALUATES, "save_strategy no", "load_best_model_at_end"),
        ("kl_beta = 0.1\nkl_target = 0.2\n", "kl_beta 0", "kl_target"),
        ('save_final = "merged"\n', "use_lora false", "save_final"),
        ("vllm_server_port = 8001\n", 'vllm_servers ["h:1"]', "vllm_server_port"),
    ],
)
def test_what_a_later_layer_switches_off_takes_its_dependents_along(compose, text, word, gone):
    name = word.split()[0]
    config = compose(BASE + text, words=f"--trainer.args.{word}")
    check_trainer_args(config)
    config.make_args(use_cpu=True)  # nothing is refused
    assert not {*gone.split()} & config.trainer.args.keys()
    rest = {line.split(" = ")[0] for line in (BASE + text).splitlines() if " = " in line}
    assert rest & config.trainer.args.keys() >= {"max_steps", "loss_args"} - {name}
    # What the same layer, or a later one, has is meant, and is refused with its place.
    if name == "kl_beta":
        for texts, where in (
            ((BASE + "kl_beta = 0.0\nkl_target = 0.2\n",), "/0/"),
            ((BASE + "kl_beta = 0.0\n", "[trainer.args]\nkl_target = 0.2\n"), "/1/"),
        ):
            with pytest.raises(TomlError, match=rf"{where}config\.toml: .* kl_target=0\.2: with"):
                compose(*texts).make_args(use_cpu=True)


def test_no_gpus_and_servers_that_run_already_take_along_what_needs_the_others(compose):
    text = BASE + 'fsdp = "full_shard"\n[trainer]\ngpus = 4\n'
    assert "fsdp" not in compose(text, words="--trainer.gpus 0").trainer.args
    assert compose(text, words="--trainer.gpus 2").trainer.args["fsdp"] == "full_shard"
    config = compose(BASE, words='--trainer.args.vllm_servers ["h:1"]')
    assert config.inference.gpus == 0 and config.inference.args == {}


def test_an_id_and_a_model_of_digits_are_text(compose):
    config = compose('model = "m"\n[env]\nid = "a"\n', words="--env.id 2048 --model 7")
    assert (config.envs[0].id, config.model) == ("2048", "7")


def test_the_words_of_a_configuration_give_it_again(compose):
    words = ["--trainer.args.stop", "a b", "c", "--trainer.args.run_name=x y", "--inference.gpus=0"]
    config = compose(BASE, "[trainer]\ngpus = 2\n", words=words)
    files, rest = config.layers.words[1:4:2], config.layers.words[4:]
    again = load_run_config([Path(file) for file in files], overrides_of(rest), checks_model=False)
    assert again == config
    assert again.trainer.args["stop"] == ["a b", "c"] and again.trainer.gpus == 2


def test_an_error_names_the_file_that_has_the_value(compose, tmp_path):
    later = "[trainer.args]\nlearning_rate = -1.0\n"
    with pytest.raises(TomlError, match=r"/1/config\.toml: \[trainer\.args\] learning_rate=-1\.0"):
        compose(BASE, later).make_args(use_cpu=True)
    with pytest.raises(TomlError, match=r"/0/config\.toml: \[trainer\.args\] loss_args of loss="):
        config = compose(BASE.replace("eps_high", "eps"), "[trainer.args]\nbatch_size = 32\n")
        config.make_args(use_cpu=True)
    with pytest.raises(TomlError, match=r"^the command line: \[trainer\.args\] seed=-1: must be"):
        compose(BASE, words="--trainer.args.seed -1").make_args(use_cpu=True)
    with pytest.raises(TomlError, match=r"/1/config\.toml: \[\[env\]\] 1: weight=0"):
        compose(BASE, '[[env]]\nid = "a"\nweight = 0\n')
    # A key that no file has: all files are named.
    with pytest.raises(TomlError, match=r"/0/config\.toml, \S+/1/config\.toml: model is missing"):
        compose('[env]\nid = "a"\n', "[trainer]\ngpus = 0\n")


def test_modules_are_found_beside_every_file_and_in_further_folders(compose, tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = compose('import_from = ["../shared"]\n' + BASE, "[trainer.args]\nmax_steps = 1\n")
    assert config.folders == [tmp_path / "1", tmp_path / "0", tmp_path / "shared"]
    for name, folder in (("loss_of_layers", "0"), ("masks_of_layers", "shared")):
        (tmp_path / folder / f"{name}.py").write_text("def mine(inputs): ...\n")
    words = "--trainer.args.loss loss_of_layers:mine --trainer.args.loss_args {} "
    words += "--trainer.args.gradient_masks {masks_of_layers:mine={}}"
    words = words.replace("masks_of_layers:mine=", '"masks_of_layers:mine"=')
    config = compose('import_from = ["../shared"]\n' + BASE, "", words=words)
    config.trainer.args["loss_args"] = {}
    make_importable(config.folders)
    config.make_args(use_cpu=True).complete_loss(None)


def test_a_dash_in_a_key_of_the_command_line_means_an_underscore_but_not_in_a_whole_table(compose):
    words = ["--env.args.my-size", "3", "--env.args.limits", '{"my-key" = 1}']
    config = compose('model = "m"\n[env]\nid = "of_layers"\n[env.args]\n"a-b" = 2\n', words=words)
    assert config.envs[0].args == {"a-b": 2, "my_size": 3, "limits": {"my-key": 1}}


def test_words_are_files_behind_an_at_sign_options_of_the_program_or_keys_in_any_order(tmp_path):
    (tmp_path / "a.toml").write_text(BASE)
    (tmp_path / "b.toml").write_text("[trainer]\ngpus = 0\n")

    def parse(*words):
        parser = argparse.ArgumentParser(**PARSER)
        parser.add_argument("-s", "--session")
        add_run_options(parser)
        return parse_command_line(parser, list(words), checks_model=False)

    first, second = f"{tmp_path}/a.toml", f"{tmp_path}/b.toml"
    options, config = parse(
        *("--resume", "--trainer.args.run_name=a b", "@", first, "--sampling.stop", "c d", "e"),
        *("-s", "name", "--trainer.args.vllm_server_timeout", "-0.5", f"@{second}"),
    )
    assert (options.resume, options.overwrite, options.session) == (True, False, "name")
    assert config.layers.files == [Path(first), Path(second)] and config.trainer.gpus == 0
    given = {"run_name": "a b", "stop": ["c d", "e"], "vllm_server_timeout": -0.5}
    assert given.items() <= config.trainer.args.items()
    for words in ((), ("--resume",)):
        with pytest.raises(TomlError, match=r"give one as `@ config.toml`"):
            parse(*words)
    for word in ("a.toml", "-x"):
        with pytest.raises(TomlError, match=f"'{word}' belongs to no key; files are given as `@"):
            parse("@", first, word)
    with pytest.raises(SystemExit):
        parse("@")


def test_vf_train_takes_several_files_and_keys(compose, tmp_path, monkeypatch, capsys):
    compose(BASE.replace("./model", "org/model"), "[trainer]\ngpus = 0\n")
    monkeypatch.setattr("verifiers_rl.cli.config.model_error", lambda model: None)
    words = ["@", f"{tmp_path}/0/config.toml", "@", f"{tmp_path}/1/config.toml"]
    words += ["--trainer.args.batch_size", "100"]
    monkeypatch.setattr(sys, "argv", ["vf-train", *words])
    with pytest.raises(SystemExit):
        train.main()
    said = capsys.readouterr().err
    assert "vf-train: error: the command line: [trainer.args] batch_size=100: must be" in said


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
