"""Training against the real vLLM server: it learns, and what breaks ends in seconds."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conftest import Started, free_port, processes_of, running_server
from tests.helpers import (
    EXAMPLE,
    EXAMPLE_MODULE,
    ROOT,
    example_env,
    load_example,
    run_python,
    write_environment,
)
from verifiers_rl import RLConfig, RLTrainer
from verifiers_rl.report.metrics import TOKEN_VALUES
from verifiers_rl.report.run_folder import read_metrics

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(warm_start, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    # On a CPU, requests with seeds need prompts that are prefilled in one piece.
    flags = ("--enable-lora", "--max-lora-rank", "16", "--no-enable-chunked-prefill")
    with running_server(warm_start, log, *flags) as server:
        yield server


def options_of(server, folder, **options):
    defaults = {
        "output_dir": str(folder / "run"),
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
    return defaults | options


@pytest.fixture
def make_trainer(warm_start, server, tmp_path):
    def make(env, model=warm_start, **options):
        return RLTrainer(str(model), env, RLConfig(**options_of(server, tmp_path, **options)))

    return make


def history(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def test_the_reward_rises_and_every_token_is_as_the_server_sampled_it(make_trainer):
    env = example_env()
    trainer = make_trainer(env, max_steps=40, eval_examples=64, eval_rollouts_per_example=2)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_reward"] > before["eval_reward"] + 0.05
    assert after["eval_exact_match"] > before["eval_exact_match"] + 0.1
    assert after["eval_num_rollouts"] == 128
    assert after["eval_exact_match"] <= after["eval_pass@2"] <= 2 * after["eval_exact_match"]
    # The first batch was sampled by the very weights it is trained on.
    assert history(trainer, "staleness")[:3] == [0.0, 1.0, 1.0]
    assert history(trainer, "importance_ratio")[0] == pytest.approx(1.0, abs=1e-4)
    assert history(trainer, "mismatch_kl")[0] < 1e-6
    assert history(trainer, "error_share") == [0.0] * 40


def test_logprobs_of_both_sides_are_equal_over_the_tokens_that_top_p_and_the_like_left(
    make_trainer, caplog
):
    options = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02, "max_off_policy_steps": 0}
    options |= {"max_steps": 1, "overwrite_output_dir": True, "learning_rate": 0.0}
    # From a worker, which runs an environment as the trainer itself does, and sends its samples.
    trainer = make_trainer(example_env(), sampling_mask=True, env_workers=1, **options)
    caplog.clear()
    trainer.train()
    assert "another distribution" not in caplog.text
    (kl,), (largest,) = history(trainer, "mismatch_kl"), history(trainer, "importance_ratio_max")
    assert kl < 1e-7 and largest == pytest.approx(1.0, abs=1e-4)
    allowed = [s.extras["allowed_tokens"][s.loss_mask] for s in trainer.batch.samples]
    counts = np.concatenate([(ids >= 0).sum(1) for ids in allowed])
    assert 1 <= counts.min() < counts.max() < 256 and (counts == 1).mean() < 0.9
    trainer = make_trainer(example_env(), **options)
    trainer.train()
    assert "sampling_mask = true makes up for top_p, top_k and min_p" in caplog.text
    assert history(trainer, "mismatch_kl")[0] > 1e-4
    assert all(sample.extras.keys() <= {*TOKEN_VALUES} for sample in trainer.batch.samples)


def test_a_deterministic_run_samples_the_same_tokens_again_in_other_processes(make_trainer, caplog):
    def sample(**options):
        options |= {"max_steps": 2, "overwrite_output_dir": True}
        trainer = make_trainer(example_env(), **options)
        trainer.train()
        return [sample.token_ids.tolist() for sample in trainer.batch.samples]

    def equal_share(one, other):
        return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)

    first = sample(deterministic=True, env_workers=0)
    assert "the last bits of the server's logits depend on the requests" in caplog.text
    groups = [first[i : i + 16] for i in range(0, 64, 16)]
    assert all(len({tuple(ids) for ids in group}) > 8 for group in groups)
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
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("vf-train: error: ")]
    assert "all 32 rollouts failed" in said and "the sandbox is not there" in said


def test_the_custom_loss_example_raises_the_reward(server, warm_start, tmp_path):
    # A copy of the examples whose model is the fixture's.
    shutil.copytree(
        ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("outputs")
    )
    outputs = tmp_path / "examples" / "reverse_text" / "outputs"
    shutil.copytree(warm_start, outputs / "warm_start")
    script = tmp_path / "examples" / "custom_loss.py"
    done = run_python(script, "--steps", "25", "--port", server.port)
    before, after = map(float, re.findall(r"held-out reward ([\d.]+) -> ([\d.]+)", done.stdout)[0])
    assert after > before + 0.05
    logged = (outputs / "custom_loss" / "metrics.jsonl").read_text()
    assert '"abs_loss"' in logged and '"clipped_share"' not in logged


def test_the_one_file_example_raises_the_reward(server, warm_start):
    script = ROOT / "examples" / "one_file.py"
    assert len(script.read_text().splitlines()) <= 200
    words = ["--model", warm_start, "--steps", "50", "--port", server.port]
    done = run_python(script, *words)
    rewards = [float(reward) for reward in re.findall(r"  reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 50
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.05


def edit(path, *replacements):
    text = path.read_text()
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def test_a_workspace_trains_on_its_own_environment_with_its_own_loss(server, warm_start, tmp_path):
    folder = tmp_path / "work"
    run_python("-m", "verifiers_rl.cli.setup", folder)
    port = f"vllm_server_port = {server.port}\n"
    edit(
        folder / "rl.toml",
        ('"./outputs/warm_start"', json.dumps(str(warm_start))),
        ('# loss = "my_loss:my_loss"', 'loss = "my_loss:my_loss"'),
        ("# loss_args = { max_ratio = 2.0 }", "loss_args = { max_ratio = 0.5 }"),
        (
            "max_steps = 60",
            f"max_steps = 3\neval_examples = 32\n{port}",
        ),
        ("logging_steps = 10", "logging_steps = 1"),
        ("eval_steps = 30", "eval_steps = 3"),
    )
    run_python("-m", "verifiers_rl.cli.train", "@", "rl.toml", folder=folder)
    rows = read_metrics(folder / "outputs" / "rl" / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["env/right_letters"] == pytest.approx(row["reward"]) for row in steps)
    assert all(row["capped_share"] == 1.0 and row["error_share"] == 0.0 for row in steps)
    assert [row["step"] for row in rows if "eval_exact_match" in row] == [0, 3]


# --- vf-rl --------------------------------------------------------------------------------------


def write_run(folder, warm_start, **options):
    """The example's TOML with another model, port, folder and length."""
    text = (EXAMPLE / "rl.toml").read_text()
    shutil.copy(EXAMPLE_MODULE, folder)
    options = {"max_steps": 4, "eval_steps": 2, "logging_steps": 1, "batch_size": 64} | options
    options |= {"output_dir": f'"{folder}/run"', "eval_examples": 64}
    options |= {"vllm_server_port": free_port()}
    text = text.replace('"./outputs/warm_start"', json.dumps(str(warm_start)))
    for name, value in options.items():
        line = "" if value is None else f"{name} = {value}"
        text, found = re.subn(rf"^{name} = .*$", line, text, flags=re.MULTILINE)
        text += "" if found else f"{line}\n"
    (folder / "rl.toml").write_text(text)
    return folder / "rl.toml"


def num_steps(folder):
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count('"reward"') if metrics.is_file() else 0


# Runs where an environment is loaded: what does this process know, and what does the server?
SPY = """
import os
from pathlib import Path
from tests.conftest import processes_of

_folder = Path(__file__).parent
_servers = [p for p, line in processes_of(_folder).items() if "inference.server" in line]
_told = [p for p in _servers if b"veiled-9431" in Path(f"/proc/{p}/environ").read_bytes()]
(_folder / f"seen-{os.getpid()}").write_text(
    f"{os.environ.get('JUDGE_NOTE')} {bool(_servers)} {bool(_told)}"
)
"""


def test_the_flat_example_runs_on_a_cpu_with_another_model_and_environment(warm_start, tmp_path):
    # An ejected trainer with one metric more.
    run_python("-m", "verifiers_rl.cli.rl", "--eject", tmp_path)
    edit(tmp_path / "my_trainer.py", ("**token_means}", '**token_means, "my_mark": 42.5}'))
    page = (ROOT / "docs" / "configuration.md").read_text()
    (tmp_path / "hosted.toml").write_text(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])
    (tmp_path / "secrets.env").write_text("JUDGE_NOTE=veiled-9431\n")
    module = (ROOT / "examples" / "reverse_text" / "reverse_text.py").read_text()
    (tmp_path / "reverse_text.py").write_text(module + SPY)
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
    variables = {"VF_RL_TEST": str(tmp_path), "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    variables |= {"WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    # From another folder than the TOMLs', whose modules are found all the same.
    done = run_python("-m", "verifiers_rl.cli.rl", *words, folder="/", **variables)
    assert processes_of(tmp_path) == {}
    log = (tmp_path / "run" / "logs" / "inference.log").read_text()
    assert "Application startup complete" in log and "startup complete" not in done.stdout
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if "reward" in row]
    assert [(row["step"], row["my_mark"]) for row in steps] == [(1, 42.5), (2, 42.5), (3, 42.5)]
    evaluations = [row for row in rows if "eval_reward" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 3]  # the first, every second, the last
    assert [row["eval_num_rollouts"] for row in evaluations] == [16] * 3  # 8 examples, 2 each
    assert list(tmp_path.rglob("run-*.wandb"))
    # The environments' secrets: where they run, not in the server, nor in what the run leaves.
    seen = [path.read_text() for path in tmp_path.glob("seen-*")]
    assert "veiled-9431 True False" in seen
    assert all(text.startswith("veiled") for text in seen), seen
    assert not any(text.endswith("True True") for text in seen)
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(left) > 5 and not any(b"veiled-9431" in path.read_bytes() for path in left)
    assert "veiled-9431" not in done.stdout + done.stderr


def teach(toml, model):
    """Mix the TOML's environment with rewards and the same one with a teacher, `model`."""
    text = toml.read_text()
    (env,) = re.findall(r"^\[env.*?(?=^\[inference\])", text, re.MULTILINE | re.DOTALL)
    one = env.removeprefix("[env]\n")
    taught = 'name = "taught"\nalgorithm = "opd"\nteacher = "same"\n'
    text = text.replace(env, f'[[env]]\nname = "rewarded"\n{one}[[env]]\n{taught}{one}')
    text += f'[[teacher]]\nname = "same"\nmodel = {json.dumps(str(model))}\n[teacher.args]\n'
    toml.write_text(text + 'dtype = "float32"\nenforce_eager = true\nmax_num_seqs = 64\n')


def test_vf_rl_starts_a_killed_server_again_beside_a_teacher_and_training_goes_on(
    warm_start, tmp_path
):
    no_evaluations = {"eval_on_start": "false", "eval_strategy": '"no"', "eval_steps": None}
    toml = write_run(tmp_path, warm_start, max_steps=12, **no_evaluations)
    teach(toml, warm_start)
    command = [sys.executable, "-m", "verifiers_rl.cli.rl", "@", str(toml)]
    environment = {**os.environ, "VF_RL_TEST": str(tmp_path)}
    with Started(command, environment, tmp_path / "output.log") as run:
        run.wait_until(lambda: num_steps(tmp_path) > 1)
        lines = processes_of(tmp_path)
        servers = [pid for pid in lines if "-m verifiers_rl.inference.server" in lines[pid]]
        server, _ = sorted(servers, key=lambda pid: "--max-model-len 65" in lines[pid])
        (where,) = re.findall(r"starting teacher-same on (\S+),", run.said())
        status = f"http://{where}/weight_sync/status"
        assert httpx.get(status, trust_env=False).status_code == 401
        trainer = next(pid for pid, line in lines.items() if "verifiers_rl.cli.train" in line)
        told = Path(f"/proc/{trainer}/environ").read_text()
        (key,) = re.findall(r"VERIFIERS_RL_TOKEN=([\w-]+)", told)
        assert not any(key in line for line in lines.values())
        os.kill(server, signal.SIGKILL)
        assert run.process.wait(300) == 0, run.said()
    assert "inference ended with status 137; starting it again in 1 s" in run.said()
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in row]
    # Every step once, and what was sampled again was sampled by the newest weights.
    assert [row["step"] for row in rows] == list(range(1, 13))
    versions = [row["policy_version"] for row in rows]
    assert versions == sorted(versions) and max(row["staleness"] for row in rows) == 1
    # 0: the first, and after the restart unless its batch had come before the server died.
    assert [row["staleness"] for row in rows].count(0) in (1, 2)
    # At the start the teacher is the student itself, and then the student leaves it.
    kls = [row["taught/teacher_kl"] for row in rows]
    assert abs(kls[0]) < 1e-5 and max(map(abs, kls[2:])) > 1e-4, kls
    assert not any("rewarded/teacher_kl" in row for row in rows)
    assert all("rewarded/reward" in row and "taught/reward" in row for row in rows)
    for name, num_starts in (("inference", 2), ("teacher-same", 1)):
        log = tmp_path / "run" / "logs" / f"{name}.log"
        assert log.read_text().count("Application startup complete") == num_starts
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
    model = tmp_path / "model"
    load_example("warm_start").make_model(tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    no_evaluations = {"eval_on_start": "false", "eval_strategy": '"no"', "eval_steps": None}
    toml = write_run(
        tmp_path, model, max_steps=5, batch_size=32, max_off_policy_steps=0,
        save_strategy='"steps"', save_steps=1, **no_evaluations,
    )  # fmt: skip
    edit(
        toml,
        ("[inference.args]", "[inference.args]\nenable_sleep_mode = true"),
        ("[trainer]", '[trainer]\nclass = "turns:TakesTurns"'),
    )
    (tmp_path / "turns.py").write_text(TAKES_TURNS)
    words = ["-c", LIKE_A_GPU, "@", str(toml)]
    variables = {"VF_RL_TEST": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with Started(
        [sys.executable, *words], {**os.environ, **variables}, tmp_path / "output.log"
    ) as run:
        assert run.process.wait(900) == 128 + signal.SIGKILL, run.said()[-6000:]
    assert run.said().count("inference ended with status 137; starting it again in 1 s") == 3
    assert processes_of(tmp_path) == {}  # the server that slept has ended, too
    done = run_python(*words, "--resume", **variables)
    assert "inference ended" not in done.stdout
    assert (tmp_path / "turns").read_text().splitlines() == [
        "pushed 0", "killed falling asleep",
        "pushed 1", "asleep", "killed asleep",
        "pushed 2", "asleep", "killed in a push",
        "pushed 3", "asleep", "killed with the trainer",
        "pushed 3", "asleep",
        "pushed 4", "asleep",
        "pushed 5",
    ]  # fmt: skip
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["policy_version"] for row in rows] == [0, 1, 2, 3, 4]
    # What slept and woke samples with the weights of the push that woke it.
    assert max(row["mismatch_kl"] for row in rows) < 1e-6
