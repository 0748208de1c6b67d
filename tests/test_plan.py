"""What a run starts, and on which GPUs."""

import json
import os

import pytest

from tests.configs import make_config
from tests.helpers import ROOT
from verifiers_rl.cli import gpus, plan, rl
from verifiers_rl.cli.config import TomlError
from verifiers_rl.cli.plan import SERVERS_VARIABLE, plan_servers

ON_A_CPU = "inference.gpus = 0\ntrainer.gpus = 0"
TEACHERS = """
[[env]]
id = "a"
algorithm = "opd"
teacher = "big"
[[env]]
id = "b"
algorithm = "opd"
teacher = "old"
[[env]]
id = "c"
algorithm = "opd"
teacher = "far"
[[teacher]]
name = "big"
model = "org/big"
gpus = 2
[[teacher]]
name = "far"
model = "m"
base_url = "http://far:8000"
[[teacher]]
name = "old"
model = "org/old"
gpus = 1
args.max_model_len = 900
"""


def flags_of(config, name="inference"):
    """The flags of a server with this name."""
    (found,) = [one for one in plan_servers(config) if one.name == name]
    return " ".join(found.command("h", 7))


def test_servers_get_the_first_gpus_in_their_order_and_the_trainer_the_next(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3, 4,5,6,7,8")
    config = make_config("inference.replicas = 2\ntrainer.gpus = 2", TEACHERS)
    assert plan.assign_gpus(config, plan_servers(config)) == {
        "inference-0": "2", "inference-1": "3", "teacher-big": "4,5", "teacher-old": "6",
        "trainer": "7,8",
    }  # fmt: skip
    config.inference.gpus = 2
    with pytest.raises(
        TomlError,
        match=r"9 GPUs are asked for \(inference-0 2, inference-1 2, teacher-big 2, "
        r"teacher-old 1, trainer 2\), 7 are visible",
    ):
        plan.assign_gpus(config, plan_servers(config))


def test_a_cpu_server_needs_the_cpu_build(monkeypatch):
    monkeypatch.setattr(plan, "version", lambda name: "0.32.0")
    config = make_config(ON_A_CPU)
    with pytest.raises(TomlError, match=r"inference\.gpus=0, and vllm 0\.32\.0 needs a GPU"):
        plan.assign_gpus(config, plan_servers(config))
    # Servers that run already.
    config = make_config("trainer.gpus = 0\ntrainer.args.vllm_servers = ['a:1', 'b:1']")
    assert plan_servers(config) == [] and plan.assign_gpus(config, []) == {"trainer": ""}


@pytest.mark.parametrize(
    "sizes, message",
    [
        ("data_parallel_size = 'two'", "data_parallel_size='two': .* must be whole numbers from 1"),
        ("data_parallel_size = 3", r"product must divide inference\.gpus=4"),
        ("tensor_parallel_size = 3", r"tensor_parallel_size=3: .* must be inference\.gpus=4"),
    ],
)
def test_flags_that_do_not_use_the_gpus_of_a_server_are_refused(sizes, message):
    with pytest.raises(TomlError, match=message):
        plan_servers(make_config("inference.gpus = 4\n[inference.args]", sizes))


@pytest.mark.parametrize(
    "line, split, said",
    [
        ("", (4, 1), "4 GPUs for inference: 4 replicas of 1"),
        ("args.tensor_parallel_size = 2", (2, 2), "2 replicas of 2"),
        ("args.tensor_parallel_size = 4", (None, 4), ""),
        ("replicas = 1", (1, 4), ""),
    ],
)
def test_gpus_become_as_many_replicas_as_the_flags_allow(capsys, line, split, said):
    config = make_config("[inference]\ngpus = 4", line)
    plan.split_gpus(config)
    assert (config.inference.replicas, config.inference.gpus) == split
    assert said in capsys.readouterr().err


ONE_TEACHER = """
[env]
id = "e"
algorithm = "opd"
teacher = "one"
[[teacher]]
name = "one"
model = "org/one"
"""
SHARED = (
    "vf-rl: one GPU for the server and the trainer, with gpu_memory_utilization=0.4, "
    "max_off_policy_steps=0"
)


@pytest.mark.parametrize(
    "num_gpus, said",
    [
        (0, "vf-rl: all on CPUs\n"),
        (1, f"{SHARED}\nvf-rl: inference gets GPU 0, trainer gets GPU 0\n"),
        (8, "vf-rl: inference gets GPU 0, trainer gets GPU 1\n"),
    ],
)
def test_the_toml_of_vf_setup_runs_on_any_number_of_gpus(
    monkeypatch, tmp_path, run_main, unknown_models, num_gpus, said
):
    monkeypatch.setattr(plan, "version", lambda name: "0.32.0" if num_gpus else "0.32.0+cpu")
    monkeypatch.setattr(gpus, "_num_listed", gpus._num_listed.__wrapped__)
    lines = "".join(f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})\n" for n in range(num_gpus))
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{lines}'")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    toml = ROOT / "examples/skeleton/rl.toml"
    status, printed, error = run_main(rl.main, "--dry-run", "@", toml)
    assert status == 0 and error.endswith(said)
    assert "gpus" not in printed


def test_what_the_toml_says_of_a_shared_gpu_stays(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,3")  # which is one
    config = make_config(
        "inference.args.gpu_memory_utilization = 0.5",
        "[trainer.args]\nmax_off_policy_steps = 1",
        ONE_TEACHER,
        "gpus = 0",
    )
    plan.share_gpu(config, plans := plan_servers(config))
    assert config.trainer.args == {"max_off_policy_steps": 1}
    assert plans[0].args["gpu_memory_utilization"] == 0.5
    found = plan.assign_gpus(config, plans)
    assert found == {"inference": "3", "trainer": "3", "teacher-one": ""}
    # What a child reads, where the files have secrets.
    config = make_config()
    plan.share_gpu(config, plans := plan_servers(config))
    assert config.layers.words[2:] == ["--trainer.args.max_off_policy_steps=0"]
    assert config.trainer.args == {"max_off_policy_steps": 0}  # `fit_step` chooses the checkpoints
    assert "--gpu-memory-utilization 0.4" in " ".join(plans[0].command("h", 7))


def test_each_replica_has_a_port_of_its_own(monkeypatch):
    config = make_config("inference.replicas = 2\ntrainer.args.vllm_server_port = 9000")
    found = {one.name: (one.host, one.port) for one in plan_servers(config)}
    assert found == {"inference-0": ("127.0.0.1", 9000), "inference-1": ("127.0.0.1", 9001)}
    monkeypatch.setenv(SERVERS_VARIABLE, plan.trainer_env(found)[SERVERS_VARIABLE])
    args = config.make_args(use_cpu=True, **plan.options_of_servers())
    assert args.vllm_servers == ["127.0.0.1:9000", "127.0.0.1:9001"]
    monkeypatch.delenv(SERVERS_VARIABLE)
    assert plan.options_of_servers() == {}  # the trainer looks where its options say


def test_a_teachers_server_holds_the_longest_sample_and_the_trainer_hears_where_it_is():
    config = make_config("trainer.args.max_seq_len = 300", TEACHERS)
    flags = flags_of(config, "teacher-big")
    assert "--model org/big --max-model-len 301 --tensor-parallel-size 2 --host h" in flags
    assert "--max-model-len 900" in flags_of(config, "teacher-old")
    env = plan.trainer_env({"teacher-big": ("::1", 5), "teacher-old": ("a", 6)})
    assert json.loads(env[SERVERS_VARIABLE]) == {"teacher-big": "[::1]:5", "teacher-old": "a:6"}


LORA, TENSORS, UNCHUNKED = "--enable-lora", "--tensor-parallel-size", "--no-enable-chunked-prefill"
FLOAT32 = "inference.args.dtype = 'float32'\n"
PIPELINE = "inference.args.pipeline_parallel_size = 2\ninference.gpus = "


@pytest.mark.parametrize(
    "lines, flag, is_there",
    [
        ("trainer.args.max_seq_len = 99", "--max-model-len 99", True),
        ("trainer.args.lora_rank = 9", f"{LORA} --max-lora-rank 16", True),
        ("trainer.args.lora_modules_to_save = ['lm_head']", LORA, False),
        (FLOAT32, LORA, False),  # where lora_sync = "auto" means "merged"
        (FLOAT32 + "trainer.args.lora_sync = 'adapter'", LORA, True),
        ("trainer.args.router_replay = true", "--enable-return-routed-experts", True),
        ("trainer.args.deterministic = true\ninference.gpus = 0", UNCHUNKED, True),
        ("trainer.args.deterministic = true", UNCHUNKED, False),
        (f"{PIPELINE}8", f"{TENSORS} 4", True),
        (f"{PIPELINE}2", TENSORS, False),
    ],
)
def test_flags_of_a_server_follow_from_the_rest(monkeypatch, lines, flag, is_there):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert (flag in flags_of(make_config(lines))) == is_there


def test_a_deterministic_run_on_a_gpu_samples_alike_in_any_batch(monkeypatch):
    config = make_config("trainer.args.deterministic = true", "inference.gpus = 1")
    for of_user, expected in (("", "1"), ("0", "0")):
        monkeypatch.setattr(os, "environ", {"VLLM_BATCH_INVARIANT": of_user} if of_user else {})
        assert [one.env for one in plan_servers(config)] == [{"VLLM_BATCH_INVARIANT": expected}]


def test_trainer_options_are_checked_before_anything_starts():
    problem = r"\[trainer\.args\] fsdp=True: .* trainer\.gpus=1 must be at least 2"
    with pytest.raises(TomlError, match=problem):
        plan.check_trainer_options(make_config("trainer.gpus = 1\ntrainer.args.fsdp = true"))
