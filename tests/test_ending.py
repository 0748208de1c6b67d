"""How vf-rl, vf-train and its ranks end: Ctrl-C, SIGTERM, a killed parent. With real processes."""

import os
import signal
import sys
import time

import pytest

from tests.conftest import free_port, processes_of, wait_until
from tests.helpers import running_python
from verifiers_rl.cli import train
from verifiers_rl.process.interrupts import Interrupted

# --- vf-train -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "when, number",
    [
        ("train", signal.SIGINT),
        ("load", signal.SIGTERM),
        ("before its handlers", signal.SIGTERM),
    ],
)
def test_an_interrupted_vf_train_has_the_signals_status(
    tmp_path, monkeypatch, run_main, unknown_models, when, number
):
    def interrupt_at(place):
        if when == place:
            os.kill(os.getpid(), number)
            time.sleep(10)
        return []

    class Trainer:
        def __init__(self, model, env, args):
            # As verifiers' classic environments do.
            signal.signal(number, lambda *_: sys.exit("the environment's own handler"))

        def train(self):
            interrupt_at("before its handlers")
            raise Interrupted(number)

    monkeypatch.setattr("verifiers_rl.trainer.RLTrainer", Trainer)
    load_envs = "verifiers_rl.cli.config.RunConfig.load_envs"
    monkeypatch.setattr(load_envs, lambda self: interrupt_at("load"))
    toml = tmp_path / "config.toml"
    toml.write_text(
        'model = "m"\n[env]\nid = "e"\n[trainer]\ngpus = 0\n'
        f'[trainer.args]\noutput_dir = "{tmp_path}/run"\n'
    )
    status, _, error = run_main(train.main, "@", toml)
    assert status == 128 + number and "Traceback" not in error
    assert signal.getsignal(number) == signal.SIG_DFL  # a launcher may send another one


# --- vf-rl ----------------------------------------------------------------------------------------

# A vf-rl whose server and trainer are a few lines each.
SUPERVISED = """
import sys
from pathlib import Path
from tests.configs import make_config
from verifiers_rl.cli import plan, supervise

port, logs, *codes = sys.argv[1:]
server, trainer = (["-c", code] for code in codes)
plan.ServerPlan.command = lambda *_: server
supervise.answers = lambda address: True
config = make_config(
    "inference.gpus = 0", "trainer.gpus = 0", f"trainer.args.vllm_server_port = {port}"
)
plans = plan.plan_servers(config)
here = supervise.ThisMachine(config, plans, Path(logs), trainer)
sys.exit(supervise.supervise(config, plans, here))
"""
NOISY_SERVER = """
import signal, sys, time

def end(*_):
    print("nanobind: leaked 514 functions!")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
print("the server is up")
time.sleep(300)
"""
# Nothing but SIGKILL ends it.
STUCK_TRAINER = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("not yet"))
print("training")
while True:
    time.sleep(300)
"""


def read_until(process, text):
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended before it said {text!r}")


def test_a_second_ctrl_c_ends_a_trainer_that_does_not_end(tmp_path):
    words = free_port(), tmp_path, NOISY_SERVER, STUCK_TRAINER
    with running_python("-u", "-c", SUPERVISED, *words) as process:
        for text in ("training", "not yet"):  # which would take two minutes
            read_until(process, text)
            process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130


# --- The ranks of a killed vf-rl ------------------------------------------------------------------

# A vf-rl that starts ranks by the real launcher, which runs on a CPU too. A rank does vf-train's
# own main() up to the training, which lasts.
LAUNCH = """
import sys, time
from pathlib import Path
from tests.configs import make_config
from verifiers_rl.cli import plan
from verifiers_rl.cli.children import LocalChild

rank, folder = sys.argv[1:]
command = plan.trainer_command(make_config("trainer.gpus = 2"), [])
launcher = command[: command.index("verifiers_rl.cli.train") - 1]
child = LocalChild("trainer", [*launcher, rank, folder], {"CUDA_VISIBLE_DEVICES": "2,3"})
Path(folder, "launcher").write_text(str(child._process.pid))
time.sleep(300)
"""
RANK = """
import os, sys, time
from pathlib import Path
from verifiers_rl.cli import train
from verifiers_rl.process import ending

def wait(*command):
    names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    assert "VERIFIERS_RL_DIE_WITH_PARENT" not in os.environ
    written = Path(sys.argv[1], f"writing-{os.environ['RANK']}")
    written.write_text(" ".join(os.environ[name] for name in names))
    written.rename(Path(sys.argv[1], f"rank-{os.environ['RANK']}"))
    try:
        time.sleep(300)
    finally:
        Path(sys.argv[1], f"ended-{os.environ['RANK']}").write_text("")
        print("saving")
        time.sleep(float(os.environ["SAVING_S"]))

train.train, ending.SAVE_GRACE_S = wait, 1.0
ending.end_with.__defaults__ = (1.0,)
train.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_without_pidfds_a_process_ends_with_its_parent():
    child = """
import os, sys, time
from verifiers_rl.process.ending import end_with

def refused(pid):
    raise PermissionError(1, "Operation not permitted")

os.pidfd_open = refused
end_with({int(sys.argv[1])})
print("waits", flush=True)
time.sleep(300)
"""
    parent = "import os, subprocess, sys; subprocess.run([*sys.argv[1:], str(os.getpid())])"
    with running_python("-c", parent, sys.executable, "-c", child) as process:
        assert process.stdout.readline() == "waits\n"
        process.kill()
        assert process.stdout.read() == ""  # the child has closed it


@pytest.mark.skipif(sys.platform != "linux", reason="needs pidfds")
@pytest.mark.parametrize("killed", ["vf-rl", "launcher"])
def test_ranks_have_their_gpus_and_end_with_a_killed_parent(tmp_path, killed):
    (tmp_path / "rank.py").write_text(RANK)
    words = "-c", LAUNCH, tmp_path / "rank.py", tmp_path
    saving_s = 300 if killed == "vf-rl" else 0
    left = lambda: [*processes_of(tmp_path)]  # noqa: E731
    with running_python(*words, VF_RL_TEST=tmp_path, SAVING_S=saving_s) as process:
        try:
            ranks = [tmp_path / "rank-0", tmp_path / "rank-1"]
            wait_until(lambda: all(rank.exists() for rank in ranks), 60, left)
            assert ranks[1].read_text() == "1 2 2,3"
            if killed == "vf-rl":
                process.kill()
                process.wait()
                process.stdout.close()  # what they print goes nowhere from here on
            else:
                os.kill(int((tmp_path / "launcher").read_text()), signal.SIGKILL)
            expected = [process.pid] * (killed == "launcher")
            wait_until(lambda: left() == expected, 20, left)
            assert {p.name for p in tmp_path.glob("ended-*")} == {"ended-0", "ended-1"}
        finally:
            for pid in left():
                os.kill(pid, signal.SIGKILL)
