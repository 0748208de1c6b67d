"""Training against the real vLLM server: it learns, and what breaks ends in seconds."""

import json
import re
import shutil
import signal
import sys

import numpy as np
import pytest

from tests.conftest import Started, free_port, processes_of
from tests.helpers import (
    EXAMPLE,
    EXAMPLE_MODULE,
    ROOT,
    environment_with,
    example_env,
    load_example,
    logged,
    run_python,
    values_in,
    write_environment,
    write_model,
)
from tests.test_foreign import CLASSIC
from verifiers_rl import RLConfig, RLTrainer, WeightedEnv
from verifiers_rl.report.run_folder import read_metrics

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(warm_start, run_server):
    # On a CPU, requests with seeds need prompts that are prefilled in one piece.
    flags = ("--enable-lora", "--max-lora-rank", "16", "--no-enable-chunked-prefill")
    with run_server(warm_start, *flags) as server:
        yield server


@pytest.fixture
def make_trainer(warm_start, server, tmp_path):
    defaults = {
        "output_dir": tmp_path / "run",
        "use_cpu": True,
        "batch_size": 64,
        "rollouts_per_example": 16,
        "micro_batch_size": 64,
        "max_seq_len": 64,
        "max_tokens": 16,
        "temperature": 1.0,
        "learning_rate": 1e-3,
        "max_steps": 3,
        "save_strategy": "no",
        "vllm_server_port": server.port,
    }
    return lambda env, **options: RLTrainer(str(warm_start), env, RLConfig(**defaults | options))


def test_the_reward_rises_and_every_token_is_as_the_server_sampled_it(make_trainer):
    trainer = make_trainer(
        example_env(), max_steps=40, eval_examples=64, eval_rollouts_per_example=2
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_reward"] > before["eval_reward"] + 0.05
    assert after["eval_exact_match"] > before["eval_exact_match"] + 0.1
    # The first batch was sampled by the very weights it is trained on.
    first, *later = logged(trainer, "staleness_max")
    assert first == 0.0 and 1.0 in later and {*later} <= {0.0, 1.0}
    assert logged(trainer, "importance_ratio")[0] == pytest.approx(1.0, abs=1e-4)
    assert logged(trainer, "mismatch_kl")[0] < 1e-6
    assert logged(trainer, "error_share") == [0.0] * 40


def test_logprobs_of_both_sides_are_equal_over_the_tokens_that_top_p_and_the_like_left(
    make_trainer, caplog
):
    options = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02, "max_off_policy_steps": 0}
    options |= {"max_steps": 1, "overwrite_output_dir": True, "learning_rate": 0.0}
    # From a worker, which runs an environment as the trainer itself does, and sends its samples.
    trainer = make_trainer(example_env(), sampling_mask=True, env_workers=1, **options)
    trainer.train()
    (kl,), (largest,) = logged(trainer, "mismatch_kl"), logged(trainer, "importance_ratio_max")
    assert kl < 1e-7 and largest == pytest.approx(1.0, abs=1e-4)
    allowed = [s.extras["allowed_tokens"][s.loss_mask] for s in trainer.batch.samples]
    counts = np.concatenate([(ids >= 0).sum(1) for ids in allowed])
    assert 1 <= counts.min() < counts.max() < 256 and (counts == 1).mean() < 0.9
    trainer = make_trainer(example_env(), **options)
    trainer.train()
    assert "sampling_mask = true makes up for top_p, top_k and min_p" in caplog.text
    assert logged(trainer, "mismatch_kl")[0] > 1e-4


def test_a_deterministic_run_samples_the_same_tokens_again_in_other_processes(make_trainer):
    def sample(**options):
        trainer = make_trainer(example_env(), max_steps=2, overwrite_output_dir=True, **options)
        trainer.train()
        return [sample.token_ids.tolist() for sample in trainer.batch.samples]

    def equal_share(one, other):
        return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)

    first = sample(deterministic=True, env_workers=0)
    assert len({tuple(ids) for ids in first[:16]}) > 8  # of one group
    # Not all: which requests run together changes the last bits of logits.
    assert equal_share(first, sample(deterministic=True, env_workers=1)) > 0.9
    assert equal_share(first, sample(env_workers=0)) < 0.5


def test_an_environment_that_fails_in_every_rollout_ends_vf_train_with_status_1(
    server, warm_start, tmp_path
):
    raises = "raise RuntimeError('the sandbox is not there')"
    env = write_environment(tmp_path, "fragile", ["abc"], setup=raises)
    toml = tmp_path / "config.toml"
    toml.write_text(
        f'model = "{warm_start}"\n{env}[trainer]\ngpus = 0\n[trainer.args]\n'
        f"output_dir = '{tmp_path}/run'\nvllm_server_port = {server.port}\nmax_seq_len = 64\n"
        "batch_size = 32\n"
    )
    done = run_python("-m", "verifiers_rl.cli.train", "@", toml, status=1)
    assert "in setup" in done.stderr  # where the environment failed
    assert re.search("vf-train: error: .*all 32 rollouts.*sandbox is not there", done.stderr)


def test_the_custom_loss_example_raises_the_reward(server, warm_start, tmp_path):
    # A copy of the examples whose model is the fixture's.
    examples = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", examples, ignore=shutil.ignore_patterns("outputs"))
    shutil.copytree(warm_start, examples / "reverse_text/outputs/warm_start")
    done = run_python(examples / "custom_loss.py", "--steps", "25", "--port", server.port)
    before, after = map(float, re.findall(r"held-out reward ([\d.]+) -> ([\d.]+)", done.stdout)[0])
    assert after > before + 0.05


def test_the_one_file_example_raises_the_reward(server, warm_start):
    script = ROOT / "examples/one_file.py"
    assert len(script.read_text().splitlines()) <= 200
    words = ["--model", warm_start, "--steps", "50", "--port", server.port]
    done = run_python(script, *words)
    rewards = [float(reward) for reward in re.findall(r"  reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 50
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.05


def test_a_workspace_trains_on_its_own_environment_with_its_own_loss(server, warm_start, tmp_path):
    folder = tmp_path / "work"
    run_python("-m", "verifiers_rl.cli.setup", folder)
    words = ["@", "rl.toml", "--model", warm_start, "--trainer.args.max_steps", "3"]
    for option, value in {
        "loss": "my_loss:my_loss",
        "loss_args": "{ max_ratio = 0.5 }",
        "eval_examples": 32,
        "eval_steps": 3,
        "logging_steps": 1,
        "vllm_server_port": server.port,
    }.items():
        words.append(f"--trainer.args.{option}={value}")
    run_python("-m", "verifiers_rl.cli.train", *words, folder=folder)
    rows = read_metrics(folder / "outputs/rl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["env/right_letters"] == pytest.approx(row["reward"]) for row in steps)
    assert all(row["capped_share"] == 1.0 and row["error_share"] == 0.0 for row in steps)
    assert [row["step"] for row in rows if "eval_exact_match" in row] == [0, 3]


def test_a_classic_environment_trains_in_its_own_python_beside_one_of_v1(make_trainer, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    args = {"num_train": 2048, "num_eval": 64, "instruction": ""}
    classic = {"id": "classic_reverse_text", "args": args}
    folders = [ROOT / "examples/classic"]
    old = WeightedEnv(classic, "old", python=str(CLASSIC), folders=folders)
    trainer = make_trainer(
        [old, WeightedEnv(example_env(), "new")],
        max_off_policy_steps=0,
        max_steps=2,
        eval_examples=64,
    )
    trainer.evaluate()
    trainer.train()
    assert logged(trainer, "error_share") == [0.0] * 2
    kls = logged(trainer, "mismatch_kl")
    assert kls[0] < 1e-6 and max(kls) < 1e-5
    assert {rollout.env for rollout in trainer.batch.rollouts} == {"old", "new"}


# --- vf-rl --------------------------------------------------------------------------------------


def words_of_run(folder, model, **options):
    """Words for vf-rl: the example's TOML with another model, port, folder and length."""
    options = {"max_steps": 4, "logging_steps": 1, "batch_size": 64} | options
    options |= {"output_dir": f"{folder}/run", "eval_examples": 64}
    options |= {"vllm_server_port": free_port()}
    words = [f"--trainer.args.{name}={value}" for name, value in options.items()]
    return ["@", EXAMPLE / "rl.toml", "--model", model, *words]


# Runs where an environment is loaded: what does this process know, and what does the server, or who
# reads command lines?
SPY = """
import os
from pathlib import Path
from tests.conftest import processes_of

_folder = Path(__file__).parent
_lines = processes_of(_folder)
_servers = [p for p, line in _lines.items() if "inference.server" in line]
_told = [p for p in _servers if b"veiled-9431" in Path(f"/proc/{p}/environ").read_bytes()]
_token = os.environ.get("VERIFIERS_RL_TOKEN")
_told += [line for line in _lines.values() if _token and _token in line]
(_folder / f"seen-{os.getpid()}").write_text(
    f"{os.environ.get('JUDGE_NOTE')} {bool(_servers)} {bool(_told)}"
)
"""


def test_the_flat_example_runs_on_a_cpu_with_another_model_and_environment(warm_start, tmp_path):
    # An ejected trainer with one metric more.
    run_python("-m", "verifiers_rl.cli.rl", "--eject", tmp_path)
    trainer = tmp_path / "my_trainer.py"
    text, mark = trainer.read_text(), '**metrics.means, "my_mark": 42.5}'
    trainer.write_text(text.replace("**metrics.means}", mark))
    page = (ROOT / "docs/configuration.md").read_text()
    (tmp_path / "hosted.toml").write_text(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])
    (tmp_path / "secrets.env").write_text("JUDGE_NOTE=veiled-9431\n")
    (tmp_path / "reverse_text.py").write_text(EXAMPLE_MODULE.read_text() + SPY)
    own = 'id = "reverse_text"\nargs = { instruction = "", num_tasks = 64 }\n'
    (tmp_path / "here.toml").write_text(
        f"model = {json.dumps(str(warm_start))}\n[[env]]\n{own}only = 'train'\n"
        f"[[env]]\n{own.replace('64', '64, held_out = true')}only = 'eval'\n"
        "[inference]\ngpus = 0\n[inference.args]\n"
        'dtype = "float32"\nenforce_eager = true\nmax_num_seqs = 64\n[trainer]\ngpus = 0\n'
        'class = "my_trainer:RLTrainer"\n'
        f"[trainer.args]\nmax_seq_len = 64\nmax_tokens = 16\noutput_dir = '{tmp_path}/run'\n"
        f"vllm_server_port = {free_port()}\n"
    )
    words = ["@", tmp_path / "hosted.toml", "@", tmp_path / "here.toml", "--max_steps", "3"]
    words += ["--batch_size=32", "--eval.interval", "2", "--eval.num_examples=8"]
    variables = {"VF_RL_TEST": tmp_path, "WANDB_MODE": "offline"}
    variables |= {"WANDB_DIR": tmp_path, "WANDB_SILENT": "true"}
    # From another folder than the TOMLs', whose modules are found all the same.
    done = run_python("-m", "verifiers_rl.cli.rl", *words, folder="/", **variables)
    assert processes_of(tmp_path) == {}
    rows = read_metrics(tmp_path / "run")
    steps = [(row["step"], row["my_mark"]) for row in rows if "reward" in row]
    assert steps == [(1, 42.5), (2, 42.5), (3, 42.5)]
    evaluated = [(r["step"], r["eval_num_rollouts"]) for r in rows if "eval_reward" in r]
    # The first, every second, the last; of 8 examples, 2 each.
    assert evaluated == [(0, 16), (2, 16), (3, 16)]
    assert list(tmp_path.rglob("run-*.wandb"))
    # The environments' secrets: where they run, not in the server, nor in what the run leaves.
    seen = {path.read_text() for path in tmp_path.glob("seen-*")}
    assert "veiled-9431 True False" in seen
    assert seen <= {"veiled-9431 True False", "veiled-9431 False False"}
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(left) > 5 and not any(b"veiled-9431" in path.read_bytes() for path in left)
    assert "veiled-9431" not in done.stdout + done.stderr


def test_a_toml_mixes_rewards_and_a_teacher_that_vf_rl_serves(warm_start, tmp_path):
    # The environment with rewards, and the same one with the student as its teacher.
    own = 'taskset = { id = "reverse_text", instruction = "" }\n'
    (tmp_path / "taught.toml").write_text(
        f'[[env]]\nname = "rewarded"\n{own}[[env]]\nname = "taught"\nalgorithm = "opd"\n'
        f'teacher = "same"\n{own}[[teacher]]\nname = "same"\nmodel = "{warm_start}"\n'
        '[teacher.args]\ndtype = "float32"\nenforce_eager = true\nmax_num_seqs = 64\n'
    )
    words = words_of_run(tmp_path, warm_start, max_steps=12, eval_strategy="no")
    words += ["@", tmp_path / "taught.toml"]
    run_python("-m", "verifiers_rl.cli.rl", *words, VF_RL_TEST=tmp_path)
    rows = read_metrics(tmp_path / "run")
    kls = values_in(rows, "taught/teacher_kl")
    # At the start the teacher is the student itself, and then the student leaves it.
    assert len(kls) == 12 and abs(kls[0]) < 1e-5 and max(map(abs, kls[2:])) > 1e-4, kls
    assert not any("rewarded/teacher_kl" in row for row in rows)
    assert processes_of(tmp_path) == {}


# --- A device that server and trainer share -------------------------------------------------------

LIKE_A_GPU = """
from verifiers_rl.cli import plan, rl

command = plan.ServerPlan.command
plan.ServerPlan.command = lambda *args: ["-m", "tests.gpu_like_server", *command(*args)[2:]]
rl.main()
"""

# It notes the turns. In each phase of a turn it kills the server, and once itself.
TAKES_TURNS = """
import functools, os, signal, threading
from pathlib import Path
from tests.conftest import processes_of
from verifiers_rl import RLTrainer
from verifiers_rl.sync.weight_sync import WeightSync

FOLDER = Path(__file__).parent
sleep, send, finish_push = WeightSync.sleep, WeightSync.send, WeightSync.finish_push
WeightSync.__init__ = functools.partialmethod(WeightSync.__init__, bucket_bytes=500_000)

def note(text):
    with (FOLDER / "turns").open("a") as file:
        file.write(f"{text}\\n")

def signal_to(name, number):
    processes = processes_of(FOLDER)
    os.kill(next(pid for pid, line in processes.items() if name in line), number)

def kill_once(number, when, name="-m tests.gpu_like_server"):
    if version != number or f"killed {when}" in (FOLDER / "turns").read_text():
        return False
    note(f"killed {when}")
    signal_to(name, signal.SIGKILL)
    return True

class TakesTurns(RLTrainer):
    def push_weights(self):
        global version, num_sent
        version, num_sent = self.state.global_step, 0
        super().push_weights()

def count_buckets(sync, bucket):
    global num_sent
    num_sent += 1
    if num_sent == 3:
        kill_once(3, "in a push")
    send(sync, bucket)

def note_push(sync):
    finish_push(sync)
    note(f"pushed {version}")

def fall_asleep(sync):
    if version == 0:  # its engine does not come to an end with it
        signal_to("EngineCore", signal.SIGSTOP)
        threading.Timer(0.5, kill_once, [0, "falling asleep"]).start()
    sleep(sync)
    note("asleep")
    kill_once(1, "asleep")
    kill_once(3, "with the trainer", "-m verifiers_rl.cli.train")

WeightSync.send, WeightSync.finish_push = count_buckets, note_push
WeightSync.sleep = fall_asleep
"""


def test_a_run_on_a_shared_device_goes_on_when_either_side_is_killed_in_a_phase(
    tokenizer, tmp_path
):
    model = write_model(tmp_path / "model", load_example("warm_start").make_model(tokenizer))
    (tmp_path / "turns.py").write_text(TAKES_TURNS)
    (tmp_path / "turns.toml").write_text(
        '[inference.args]\nenable_sleep_mode = true\n[trainer]\nclass = "turns:TakesTurns"\n'
    )
    options = {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 1}
    options |= {"max_steps": 5, "batch_size": 32, "max_off_policy_steps": 0}
    words = ["-c", LIKE_A_GPU, *words_of_run(tmp_path, model, **options)]
    words += ["@", tmp_path / "turns.toml"]
    variables = {"VF_RL_TEST": tmp_path}
    environment = environment_with(**variables)
    with Started([sys.executable, *words], environment, tmp_path / "output.log") as run:
        assert run.process.wait(900) == 128 + signal.SIGKILL, run.said()[-6000:]
    assert run.said().count("inference ended with status 137; starting it again in 1 s") == 3
    assert processes_of(tmp_path) == {}  # the server that slept has ended, too
    assert "inference ended" not in run_python(*words, "--resume", **variables).stdout
    assert (tmp_path / "turns").read_text().splitlines() == [
        "pushed 0", "killed falling asleep",
        "pushed 1", "asleep", "killed asleep",
        "pushed 2", "asleep", "killed in a push",
        "pushed 3", "asleep", "killed with the trainer",
        "pushed 3", "asleep",
        "pushed 4", "asleep",
        "pushed 5",
    ]  # fmt: skip
    rows = [row for row in read_metrics(tmp_path / "run") if "reward" in row]
    assert [(row["step"], row["policy_version"]) for row in rows] == [
        (step, step - 1) for step in range(1, 6)
    ]
    # What slept and woke samples with the weights of the push that woke it.
    assert max(row["mismatch_kl"] for row in rows) < 1e-6
