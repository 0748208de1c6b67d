"""The teachers of a TOML: from its tables to the `Teacher`s of a run, and the servers between."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers import ROOT
from verifiers_rl.cli import config as config_module
from verifiers_rl.cli import plan, rl
from verifiers_rl.cli.config import RunConfig, TomlError, load_run_config
from verifiers_rl.cli.machines import machine_of
from verifiers_rl.cli.teachers import TEACHERS_VARIABLE, TeacherTable
from verifiers_rl.inference.client import TOKEN_VARIABLE

ENVS = """
[[env]]
id = "letters"
[[env]]
id = "words"
algorithm = "opd"
teacher = "big"
distill_coef = 0.5
[[env]]
name = "sums"
algorithm = "opsd"
teacher = "old"
hint = "It is {answer}."
[env.taskset]
id = "sums"
"""
TEACHERS = """
[[teacher]]
name = "big"
model = "org/big"
base_url = "http://10.0.0.2:8000/v1"
key_variable = "BIG_KEY"
max_concurrent = 8
[[teacher]]
name = "old"
model = "./old"
gpus = 2
[teacher.args]
max-num-seqs = 16
"""
OURS = 'model = "org/small"\n[trainer.args]\nmax_steps = 3\n'
FLAT = 'model = "org/small"\nmax_steps = 3\n'


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.delenv(TEACHERS_VARIABLE, raising=False)

    def read(text, *overrides):
        path = tmp_path / "rl.toml"
        path.write_text(text)
        return load_run_config(path, overrides, checks_model=False)

    return read


@pytest.fixture
def no_environments(monkeypatch):
    monkeypatch.setattr(config_module.EnvTable, "load", lambda self, *folders: f"env {self.id}")


@pytest.mark.parametrize("head", [OURS, FLAT], ids=["ours", "flat"])
def test_environments_of_a_toml_learn_from_its_teachers(
    read, tmp_path, monkeypatch, no_environments, head
):
    config = read(head + ENVS + TEACHERS, ("trainer.args.vllm_server_timeout", "77"))
    monkeypatch.setenv(TEACHERS_VARIABLE, json.dumps({"old": "http://127.0.0.1:4321"}))
    monkeypatch.setenv(TOKEN_VARIABLE, "of the run")
    monkeypatch.setenv("BIG_KEY", "of the user")
    letters, words, sums = config.load_envs()
    assert (letters.env, letters.scorer) == ("env letters", None)
    words, sums = words.scorer, sums.scorer
    assert (words.algorithm, words.distill_coef, words.hint) == ("opd", 0.5, "")
    assert (sums.algorithm, sums.distill_coef, sums.hint) == ("opsd", 1.0, "It is {answer}.")
    big, old = words.teacher, sums.teacher
    assert (big.name, big.model, big.base_url) == ("big", "org/big", "http://10.0.0.2:8000")
    assert (big.key(), big.timeout_s, big.max_concurrent) == ("of the user", 300.0, 8)
    assert (old.model, old.base_url) == (str(tmp_path / "old"), "http://127.0.0.1:4321")
    # Its server may take as long as the others to load.
    assert (old.key(), old.timeout_s, old.max_concurrent) == ("of the run", 77, 64)
    assert config.teachers[1].args == {"max_num_seqs": 16}


def test_where_nothing_learns_no_teacher_is_needed(read, no_environments):
    envs = read(OURS + ENVS + TEACHERS).load_envs(with_teachers=False)
    assert [env.name for env in envs] == ["letters", "words", "sums"]
    assert not any(env.scorer for env in envs)


def test_a_teacher_that_only_vf_rl_starts_is_one_line_elsewhere(read, no_environments):
    config = read(OURS + ENVS + TEACHERS)
    with pytest.raises(TomlError, match=r"rl\.toml: \[\[teacher\]\] 2: teacher 'old' has no base_"):
        config.load_envs()


def test_keys_of_the_command_line_reach_a_teacher_and_an_environment(read):
    config = read(
        OURS + ENVS + TEACHERS,
        ("teacher.1.gpus", "1"), ("teacher.1.args.dtype", "float32"), ("env.2.hint", "3"),
    )  # fmt: skip
    old = config.teachers[1]
    assert (old.gpus, old.args) == (1, {"max_num_seqs": 16, "dtype": "float32"})
    assert config.envs[2].learning["hint"] == "3"


def test_a_dry_run_shows_teachers_as_they_would_be_started(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rl.toml").write_text(OURS + ENVS + TEACHERS)
    monkeypatch.setattr(sys, "argv", ["vf-rl", "--dry-run", "@", "rl.toml"])
    assert rl.run() == 0
    shown = tomllib.loads(capsys.readouterr().out)
    big, old = shown["teacher"]
    assert big["base_url"] == "http://10.0.0.2:8000/v1" and big["key_variable"] == "BIG_KEY"
    assert old == {
        "name": "old", "model": str(tmp_path / "old"), "gpus": 2, "args": {"max_num_seqs": 16}
    }  # fmt: skip
    assert shown["env"][1]["teacher"] == "big" and shown["env"][1]["distill_coef"] == 0.5
    (written,) = tmp_path.rglob("resolved.toml")
    again = load_run_config(written, checks_model=False)
    assert again.teachers == load_run_config(tmp_path / "rl.toml", checks_model=False).teachers


def test_on_a_cpu_a_teacher_needs_no_gpus(read):
    cpu = "[inference]\ngpus = 0\n[trainer]\ngpus = 0\n"
    text = 'model = "m"\n' + cpu + ENVS + TEACHERS.replace("gpus = 2\n", "")
    assert [table.gpus for table in read(text).teachers] == [None, 0]


# --- The servers that vf-rl starts ----------------------------------------------------------------


def table(number, name, gpus, **args):
    return TeacherTable(number, name, "org/big", gpus, args)


def test_teachers_have_the_gpus_behind_the_trainers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5,6,7")
    teachers = [table(0, "big", 2), TeacherTable(1, "far", "m"), table(2, "old", 1)]
    config = RunConfig(Path("/a/rl.toml"), "m", [], teachers=teachers, inference_gpus=2)
    assert plan.assign_gpus(config) == ("2,3", "4", "5,6", "7")
    config.inference_replicas = 2
    with pytest.raises(
        TomlError,
        match=r"inference.gpus=2 for each of 2 replicas, trainer.gpus=1, gpus=2 of teacher 'big' "
        r"and gpus=1 of teacher 'old' need 8 GPUs, 6 are visible",
    ):
        plan.assign_gpus(config)


def test_a_teachers_server_uses_all_of_its_gpus_and_holds_the_longest_sample():
    config = RunConfig(Path("/a/rl.toml"), "m", [], trainer_args={"max_seq_len": 300})
    words = " ".join(plan.teacher_command(config, table(0, "big", 4), "127.0.0.1", 7))
    assert "-m verifiers_rl.inference.server --model org/big" in words
    assert "--max-model-len 301" in words and "--tensor-parallel-size 4" in words
    assert "--host 127.0.0.1 --port 7" in words and "lora" not in words
    own = table(0, "big", 4, max_model_len=900, pipeline_parallel_size=2)
    words = " ".join(plan.teacher_command(config, own, "127.0.0.1", 7))
    assert "--max-model-len 900" in words and "--tensor-parallel-size 2" in words
    config.teachers = [table(0, "big", 4, tensor_parallel_size=3)]
    with pytest.raises(TomlError, match=r"the product 3 must divide teacher\.0\.gpus=4"):
        plan.check_parallel_sizes(config)


def test_on_a_cpu_server_and_teachers_have_cores_of_their_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    teachers = [table(0, "big", 0), table(1, "gpu", 1), table(2, "old", 0)]
    config = RunConfig(Path("/a/rl.toml"), "m", [], teachers=teachers, inference_gpus=0)
    envs = [plan.server_env(config, "", 0)]
    envs += [plan.teacher_env(config, teachers[n], "") for n in (0, 2)]
    assert [env["VLLM_CPU_OMP_THREADS_BIND"] for env in envs] == ["0,1", "2,3", "4,5"]
    of_gpu = plan.teacher_env(config, teachers[1], "0")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in of_gpu


def test_several_machines_get_no_teacher_from_vf_rl(read, monkeypatch):
    config = read(OURS + ENVS + TEACHERS + '[cluster]\nengine = "ray"\n')
    with pytest.raises(TomlError, match=r"vf-rl starts teacher 'old' in a run on one machine only"):
        machine_of(config)
    for name, value in {"MASTER_ADDR": "host", "MASTER_PORT": "5", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    config = read(OURS + ENVS + TEACHERS)
    with pytest.raises(TomlError, match=r"Start its server yourself, and set base_url"):
        machine_of(config)


# A server that answers, and dies: in its first life when it is told to, in others at once or not.
SUPERVISE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen
from verifiers_rl.cli import children, plan, rl, supervise
from verifiers_rl.cli.config import RunConfig
from verifiers_rl.cli.teachers import TeacherTable

folder = Path(sys.argv[1])
TEACHER = '''
import http.server, os, sys, threading, time
from pathlib import Path
port, folder = int(sys.argv[1]), Path(sys.argv[2])
with (folder / "lives").open("a") as file:
    file.write("one ")
is_first = len((folder / "lives").read_text().split()) == 1
if not is_first and sys.argv[3] == "dies":
    sys.exit(9)
print("here", flush=True)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Health)
threading.Thread(target=server.serve_forever, daemon=True).start()
while not (is_first and (folder / "die").exists()):
    time.sleep(0.01)
os._exit(9)
'''
TRAINER = '''
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
wait_for("seen 1")
(folder / "die").touch()
wait_for("seen 2")
print("teachers", os.environ["VERIFIERS_RL_TEACHERS"], flush=True)
sys.exit(7)
'''

def answers(host, port):
    try:
        urlopen(f"http://{host}:{port}").close()
    except URLError:
        return False
    lives = len((folder / "lives").read_text().split())
    (folder / f"seen {lives}").touch()
    return True

plan.answers = answers
children.MAX_RESTARTS, children.BACKOFF_S, supervise.POLL_S = 2, 0.05, 0.02
plan.teacher_command = lambda config, table, host, port: [
    "-c", TEACHER, str(port), str(folder), sys.argv[2]
]
rl.trainer_command = lambda *_: ["-c", TRAINER, str(folder)]
teachers = [TeacherTable(0, "big", "m", 0)]
args = {"vllm_servers": ["127.0.0.1:1"]}
config = RunConfig(Path("/a/rl.toml"), "m", [], trainer_args=args, teachers=teachers)
machine = rl.ThisMachine(config, SimpleNamespace(server_log=None), ("", "", ""))
sys.exit(supervise.supervise(config, machine))
"""


@pytest.mark.parametrize("then", ["lives", "dies"])
def test_a_teacher_that_dies_is_started_again_and_not_for_ever(tmp_path, then):
    command = [sys.executable, "-c", SUPERVISE, str(tmp_path), then]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    assert "[teacher-big] here" in done.stdout, said
    assert "teacher 'big' ended with status 9; starting it again in 0.05 s" in done.stdout
    if then == "lives":
        assert done.returncode == 7, said  # the trainer's
        (port,) = re.findall(r"starting teacher 'big' on 127\.0\.0\.1:(\d+), up to", done.stdout)
        assert f'teachers {{"big": "http://127.0.0.1:{port}"}}' in done.stdout
    else:
        assert done.returncode == 1
        assert (
            "vf-rl: error: teacher 'big' ended with status 9, too often; see its log" in done.stderr
        )
