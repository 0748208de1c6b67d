"""Training against the real vLLM server: it learns, and what breaks ends in seconds."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.conftest import free_port, processes_of, running_server
from tests.helpers import (
    EXAMPLE,
    EXAMPLE_MODULE,
    ROOT,
    at_bucket,
    example_env,
    make_env,
    write_environment,
)
from verifiers_rl import RLConfig, RLTrainer, WeightedEnv
from verifiers_rl.distill import Distillation
from verifiers_rl.inference.client import InferenceClient, InferenceServerError
from verifiers_rl.orchestrator import RolloutError

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(warm_start, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    # On a CPU, requests with seeds need prompts that are prefilled in one piece.
    flags = ("--enable-lora", "--max-lora-rank", "16", "--no-enable-chunked-prefill")
    with running_server(warm_start, log, *flags) as server:
        yield server


@pytest.fixture
def make_trainer(warm_start, server, tmp_path):
    def make(env, model=None, **options):
        defaults = {
            "output_dir": str(tmp_path / "run"),
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
        return RLTrainer(model or str(warm_start), env, RLConfig(**{**defaults, **options}))

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


def test_synchronous_batches_have_ratio_one_at_any_temperature(make_trainer):
    env = example_env()
    options = {"loss": "ppo", "advantage": "leave_one_out"}
    trainer = make_trainer(env, max_off_policy_steps=0, temperature=0.6, max_tokens=None, **options)
    trainer.train()
    assert history(trainer, "importance_ratio") == pytest.approx([1.0] * 3, abs=1e-4)
    assert history(trainer, "importance_ratio_max") == pytest.approx([1.0] * 3, abs=1e-3)
    assert history(trainer, "staleness") == [0.0] * 3
    group = trainer.batch.rollouts[:16]
    total = sum(rollout.reward for rollout in group)
    expected = [r.reward - (total - r.reward) / 15 for r in group]
    assert [r.advantage for r in group] == pytest.approx(expected)


def test_sampling_options_change_what_the_server_samples(make_trainer, caplog):
    env = example_env()

    def completions(**options):
        trainer = make_trainer(env, max_steps=1, overwrite_output_dir=True, **options)
        trainer.train()
        return trainer, [rollout.completion for rollout in trainer.batch.rollouts]

    # The likeliest token only: the rollouts of a group are all alike.
    _, greedy = completions(top_k=1)
    assert all(len(set(greedy[i : i + 16])) == 1 for i in range(0, 64, 16))
    assert "top_k: the server samples from another distribution" in caplog.text
    _, free = completions()
    assert all(len(set(free[i : i + 16])) > 1 for i in range(0, 64, 16))
    trainer, cut = completions(max_tokens=2)
    assert all(len(text) <= 2 for text in cut), cut
    assert history(trainer, "truncated_share")[0] > 0.9


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
    assert not any(sample.extras for sample in trainer.batch.samples)


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
    assert equal_share(first, sample(deterministic=True, env_workers=0, seed=7)) < 0.5
    assert equal_share(first, sample(env_workers=0)) < 0.5


def test_batches_in_advance_and_greedy_evaluations_beside_them(make_trainer):
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_examples": 16, "max_steps": 5}
    trainer = make_trainer(
        example_env(),
        max_off_policy_steps=2,
        max_concurrent=48,
        eval_sampling={"temperature": 0.0},
        eval_rollouts_per_example=2,
        **options,
    )
    runner, evaluated, trained = trainer.orchestrator.env, [], []
    run_group, get = runner.run_group, trainer.orchestrator.get

    async def recording(request):
        group = await run_group(request)
        if request.split == "eval":
            evaluated.append(group)
        return group

    def getting():
        trained.append(get())
        return trained[-1]

    runner.run_group, trainer.orchestrator.get = recording, getting
    trainer.train()
    assert [row["step"] for row in trainer.state.log_history if "eval_reward" in row] == [2, 4, 5]
    # Both answers to an example are the likeliest tokens, of one version, that of the step.
    versions = [
        {v for rollout in group for s in rollout.samples for v in s.policy_versions if v >= 0}
        for group in evaluated
    ]
    assert versions == [{2}] * 16 + [{4}] * 16 + [{5}] * 16
    assert all(first.completion == second.completion for first, second in evaluated)
    assert max(history(trainer, "staleness_max")) <= 2.0
    assert history(trainer, "error_share") == [0.0] * 5
    examples = [example for batch in trained for example in {r.example_id for r in batch.rollouts}]
    assert len(examples) == len(set(examples)) == 20


def make_fragile(breaks):
    """Raises in the rollouts that `breaks(count)` names, in code of its own."""
    count = 0

    def setup():
        nonlocal count
        count += 1
        if breaks(count):
            raise RuntimeError("the sandbox is not there")

    questions = {"abc": "cba", "defg": "gfed"}
    return make_env(questions, lambda question, reply, answer: float(len(reply)), setup)


def test_a_server_with_other_weights_of_the_same_shapes_is_refused(
    make_trainer, warm_start, tmp_path
):
    """With an adapter the server keeps its own base model, whatever the trainer has."""
    other = AutoModelForCausalLM.from_pretrained(warm_start)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 * float(parameter.std()))
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(warm_start).save_pretrained(tmp_path / "other")
    trainer = make_trainer(example_env(), model=str(tmp_path / "other"))
    start = time.monotonic()
    with pytest.raises(
        InferenceServerError, match="samples from a different model than the one being trained"
    ):
        trainer.train()
    assert time.monotonic() - start < 60


def test_a_server_with_lora_on_a_cpu_refuses_to_be_its_own_teacher_and_lives(make_trainer, server):
    scorer = Distillation(algorithm="opsd", hint="Backwards.")
    env = WeightedEnv(example_env(), "words", scorer=scorer)
    with pytest.raises(InferenceServerError, match=r"prompt_logprobs: .* --enable-lora; start"):
        make_trainer([env]).train()
    assert InferenceClient("127.0.0.1", server.port).status()["world_size"] == 1


def test_an_error_in_one_rollout_costs_only_that_rollout(make_trainer):
    trainer = make_trainer(make_fragile(lambda count: count == 5), max_steps=2)
    trainer.train()
    assert history(trainer, "error_share") == [1 / 64, 0.0]
    assert trainer.state.global_step == 2


def test_groups_that_teach_nothing_are_replaced(make_trainer):
    def reward(question, reply, answer):
        """Always the same for one of the two examples, letters in the right place for the other."""
        if question == "abc":
            return 0.5
        return float(sum(given == right for given, right in zip(reply, answer, strict=False)))

    env = make_env({"abc": "cba", "defg": "gfed"}, reward)
    options = {
        "batch_size": 32,
        "group_filter": {"min_reward_variance": 1e-6, "max_oversampling": 2.0},
    }
    trainer = make_trainer(env, max_steps=1, **options)
    trainer.train()
    # Of the step's four groups, two epochs of two examples, those of "abc" do not pass.
    assert len(trainer.batch.rollouts) == 32
    assert all("defg" in rollout.prompt for rollout in trainer.batch.rollouts)
    assert history(trainer, "filtered_share")[0] >= 1 / 3


def test_an_error_in_every_rollout_ends_training_with_its_cause(make_trainer):
    trainer = make_trainer(make_fragile(lambda count: True))
    start = time.monotonic()
    with pytest.raises(
        RolloutError, match=r"all 64 rollouts failed.*the sandbox is not there"
    ) as caught:
        trainer.train()
    assert time.monotonic() - start < 20
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_it_ends_vf_train_with_status_1(server, warm_start, tmp_path):
    raises = "raise RuntimeError('the sandbox is not there')"
    env = write_environment(tmp_path, "fragile", {"abc": "cba"}, setup=raises)
    toml = tmp_path / "config.toml"
    toml.write_text(
        f'model = "{warm_start}"\n{env}[trainer]\ngpus = 0\n[trainer.args]\n'
        f"output_dir = '{tmp_path}/run'\nvllm_server_port = {server.port}\nmax_seq_len = 64\n"
        "batch_size = 32\n"
    )
    command = [sys.executable, "-m", "verifiers_rl.cli.train", "@", str(toml)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1
    assert "in setup" in done.stderr  # where the environment failed
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("vf-train: error: ")]
    assert "all 32 rollouts failed" in said and "the sandbox is not there" in said


SIX_STEPS = {
    "use_cpu": True,
    "batch_size": 32,
    "rollouts_per_example": 8,
    "micro_batch_size": 32,
    "max_seq_len": 64,
    "max_tokens": 16,
    "temperature": 1.0,
    "learning_rate": 1e-3,
    "max_steps": 6,
}


def after_a_bucket(trainer, version, work):
    """Does `work` when the first bucket of this version's push has left, and others have not."""
    pool, pushed = trainer.weight_sync, []
    sync = pool.replicas[0].sync
    sync.bucket_bytes = 50_000
    push = pool.push

    def watched_push(model, policy_version):
        pushed.append(policy_version)
        return push(model, policy_version)

    pool.push = watched_push
    at_bucket(
        sync, 3, lambda: work() if pushed.count(version) == 1 and pushed[-1] == version else 0
    )


KILLED_TRAINER = """
import json, os, signal, sys
from tests.helpers import example_env
from tests.test_e2e_train import Examples, after_a_bucket
from verifiers_rl import RLConfig, RLTrainer

trainer = RLTrainer(sys.argv[1], example_env(), RLConfig(**json.loads(sys.argv[2])))
examples = Examples(trainer)

def die():
    print("trained on", json.dumps(examples.of_steps), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

after_a_bucket(trainer, 3, die)
trainer.train()
"""


class Examples(TrainerCallback):
    """Which examples each step was trained on."""

    def __init__(self, trainer):
        self.trainer, self.of_steps = trainer, []
        trainer.add_callback(self)

    def on_step_end(self, args, state, control, **_):
        self.of_steps.append(sorted({r.example_id for r in self.trainer.batch.rollouts}))


def test_a_trainer_killed_in_a_push_goes_on_with_the_same_server(server, warm_start, tmp_path):
    options = {
        **SIX_STEPS,
        "output_dir": str(tmp_path / "run"),
        "save_steps": 1,
        "vllm_server_port": server.port,
        "vllm_server_timeout": 30.0,
    }
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_TRAINER, str(warm_start), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    (line,) = [line for line in killed.stdout.splitlines() if line.startswith("trained on ")]
    before = json.loads(line.removeprefix("trained on "))
    assert len(before) == 3 and server.process.poll() is None
    trainer = RLTrainer(str(warm_start), example_env(), RLConfig(**options))
    after = Examples(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert history(trainer, "policy_version") == [0, 0, 1, 3, 3, 4]
    # What the server had of the adapter was replaced: its first batch is of the very weights.
    assert history(trainer, "mismatch_kl")[3] < 1e-6
    num_groups = 32 // 8  # as SIX_STEPS says
    order = trainer.orchestrator.example_order
    sizes = trainer.orchestrator.env.sizes("train")
    steps = [range(step * num_groups, (step + 1) * num_groups) for step in range(6)]
    expected = [sorted(order(positions, sizes)) for positions in steps]
    assert before + after.of_steps == expected


def test_a_server_killed_in_a_push_costs_nothing_but_time(server, warm_start, tmp_path):
    """The server that dies is one of its own; the one that the run goes on with is the shared."""
    port = free_port()
    flags = ("--enable-lora", "--max-lora-rank", "16")
    env = example_env()
    options = {
        **SIX_STEPS,
        "output_dir": str(tmp_path / "run"),
        "save_steps": 100,
        "vllm_server_port": port,
        "vllm_server_timeout": 15.0,
    }

    def make():
        return RLTrainer(str(warm_start), env, RLConfig(**options))

    with running_server(warm_start, tmp_path / "first.log", *flags, port=port) as first:
        trainer = make()
        killed = []

        def kill_server():
            os.kill(first.process.pid, signal.SIGKILL)
            killed.append(time.monotonic())

        after_a_bucket(trainer, 3, kill_server)
        with pytest.raises(InferenceServerError, match=r"after 15 s \(vllm_server_timeout\)"):
            trainer.train()
        assert time.monotonic() - killed[0] < 45
        # vLLM's engine and workers go with its API server, though nobody told them.
        deadline = time.monotonic() + 20
        while group_of(first.process.pid):
            assert time.monotonic() < deadline, group_of(first.process.pid)
            time.sleep(0.2)
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    options |= {"vllm_server_timeout": 60.0, "vllm_server_port": server.port}
    trainer = make()
    trainer.train(resume_from_checkpoint=True)
    assert history(trainer, "reward")[3:] and trainer.state.global_step == 6
    assert history(trainer, "policy_version") == [0, 0, 1, 3, 3, 4]
    # The first batch after the restart was sampled by the very weights it is trained on.
    assert history(trainer, "importance_ratio")[3] == pytest.approx(1.0, abs=1e-4)
    assert history(trainer, "mismatch_kl")[3] < 1e-6


def group_of(leader):
    """Processes of this group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = (path / "stat").read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue  # it ended meanwhile
        if int(group) == leader and state != "Z":
            found.append((int(path.name), (path / "cmdline").read_text().replace("\0", " ")))
    return found


def test_the_custom_loss_example_raises_the_reward(server, warm_start, tmp_path):
    # A copy of the examples whose model is the fixture's.
    shutil.copytree(
        ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("outputs")
    )
    outputs = tmp_path / "examples" / "reverse_text" / "outputs"
    outputs.mkdir()
    shutil.copytree(warm_start, outputs / "warm_start")
    script = str(tmp_path / "examples" / "custom_loss.py")
    done = subprocess.run(
        [sys.executable, script, "--steps", "25", "--port", str(server.port)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = map(float, re.findall(r"held-out reward ([\d.]+) -> ([\d.]+)", done.stdout)[0])
    assert after > before + 0.05
    logged = (outputs / "custom_loss" / "metrics.jsonl").read_text()
    assert '"abs_loss"' in logged and '"clipped_share"' not in logged


def test_the_one_file_example_raises_the_reward(server, warm_start):
    script = ROOT / "examples" / "one_file.py"
    assert len(script.read_text().splitlines()) <= 200
    command = [sys.executable, str(script), "--model", str(warm_start), "--steps", "50"]
    done = subprocess.run(
        [*command, "--port", str(server.port)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
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
    make = [sys.executable, "-m", "verifiers_rl.cli.setup", str(folder)]
    subprocess.run(make, check=True, timeout=60, stdout=subprocess.DEVNULL)
    port = f"vllm_server_port = {server.port}\n"
    edit(
        folder / "rl.toml",
        ('"./outputs/warm_start"', json.dumps(str(warm_start))),
        ('# loss = "my_loss:my_loss"', 'loss = "my_loss:my_loss"'),
        ("# loss_args = { max_ratio = 2.0 }", "loss_args = { max_ratio = 0.5 }"),
        ("max_steps = 60", f"max_steps = 3\neval_examples = 32\n{port}"),
        ("logging_steps = 10", "logging_steps = 1"),
        ("eval_steps = 30", "eval_steps = 3"),
    )
    command = [sys.executable, "-m", "verifiers_rl.cli.train", "@", "rl.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = (folder / "outputs" / "rl" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["env/right_letters"] == pytest.approx(row["reward"]) for row in steps)
    assert all(row["capped_share"] == 1.0 and row["error_share"] == 0.0 for row in steps)
    assert [row["step"] for row in rows if "eval_exact_match" in row] == [0, 3]
    # The same as a script, which has the loss as an argument.
    edit(
        folder / "train.py",
        ('HERE / "outputs" / "warm_start"', f"{str(warm_start)!r}"),
        ("max_steps=60", f"max_steps=2, eval_examples=32, vllm_server_port={server.port}"),
        ("logging_steps=10", "logging_steps=1"),
    )
    script = [sys.executable, str(folder / "train.py")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    logged = (folder / "outputs" / "train" / "metrics.jsonl").read_text()
    assert '"capped_share"' in logged and '"eval_reward"' in logged


# --- vf-rl --------------------------------------------------------------------------------------


def write_run(folder, warm_start, **options):
    """The example's TOML with another model, port, folder and length."""
    text = (EXAMPLE / "rl.toml").read_text()
    shutil.copy(EXAMPLE_MODULE, folder)
    options = {"max_steps": 4, "output_dir": f'"{folder}/run"', "logging_steps": 1, **options}
    options |= {
        "vllm_server_port": free_port(),
        "batch_size": 64,
        "eval_examples": 64,
    }
    options.setdefault("eval_steps", 2)
    text = text.replace('"./outputs/warm_start"', json.dumps(str(warm_start)))
    for name, value in options.items():
        line = "" if value is None else f"{name} = {value}"
        text, found = re.subn(rf"^{name} = .*$", line, text, flags=re.MULTILINE)
        text += "" if found else f"{line}\n"
    (folder / "rl.toml").write_text(text)
    return folder / "rl.toml"


def server_pids(folder):
    command = "-m verifiers_rl.inference.server"
    return [pid for pid, line in processes_of(folder).items() if command in line]


def num_steps(folder):
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count('"reward"') if metrics.is_file() else 0


def run_in_terminal(command, folder, environment):
    """Run vf-rl in a terminal of its own, and look at the panes of its tmux session meanwhile."""
    session = f"vf-rl-test-{os.getpid()}"
    environment = {**environment, "TERM": "xterm", "TMUX_TMPDIR": str(folder)}
    environment.pop("TMUX", None)
    leader, terminal = pty.openpty()
    process = subprocess.Popen(
        [*command, "-s", session],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
        cwd="/",
    )
    os.close(terminal)

    def tmux(*words):
        return subprocess.run(
            ["tmux", "-L", session, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout

    def pane():
        return tmux("capture-pane", "-p", "-S", "-1000", "-t", f"{session}:.1")

    def wait_for(condition, seconds, what):
        deadline = time.monotonic() + seconds
        os.set_blocking(leader, False)
        while not condition():
            try:
                os.read(leader, 65536)  # a terminal that nobody reads would stop them
            except OSError:
                pass  # nothing written just now
            assert time.monotonic() < deadline, f"{what} did not happen; the pane shows {pane()}"
            time.sleep(0.2)

    try:
        wait_for(lambda: num_steps(folder) > 1, 200, "training")
        assert len(tmux("list-panes", "-t", session).splitlines()) == 2
        ended = ("display-message", "-p", "-t", f"{session}:.1", "#{pane_dead}")
        wait_for(lambda: tmux(*ended) == "1\n", 300, "the end")
        os.write(leader, b"\r")  # Enter closes the session
        wait_for(lambda: process.poll() is not None, 20, "the end of the session")
        assert process.returncode == 0
        assert server_pids(folder) == []
    finally:
        tmux("kill-server")
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(leader)
    log = (folder / "run" / "logs" / "inference.log").read_text()
    assert log.count("Application startup complete") == 1
    deadline = time.monotonic() + 20
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.2)  # the kernel ends what the tmux server held


OWN_CODE = """
import torch
from verifiers_rl import LossOutputs

def my_loss(inputs, scale):
    per_token = -scale * inputs.weights * inputs.advantages * inputs.trainer_logprobs
    return LossOutputs(per_token.sum(), {"my_scale": torch.full_like(inputs.weights, scale)})

def my_advantage(group):
    return [3.0 if i % 2 else -3.0 for i in range(len(group))]
"""


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_in_two_panes_vf_rl_trains_an_edited_fork_with_code_of_ones_own(warm_start, tmp_path):
    # Ejected and edited: one more option, and a metric of each side.
    command = [sys.executable, "-m", "verifiers_rl.cli.rl", "--eject", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    config = "@dataclasses.dataclass\nclass MyConfig(RLConfig):\n    my_mark: float = 0.0\n\n\n"
    edit(
        tmp_path / "my_trainer.py",
        ("**token_means}", '**token_means, "my_mark": self.args.my_mark}'),
        ("    config_class = RLConfig", "    config_class = MyConfig"),
        ("class RLTrainer(SavingTrainer):", f"{config}class RLTrainer(SavingTrainer):"),
        ("import copy\n", "import copy\nimport dataclasses\n"),
    )
    edit(
        tmp_path / "my_orchestrator.py",
        (
            '        metrics["filtered',
            '        metrics["my_groups"] = 1.0 * len(groups)\n        metrics["filtered',
        ),
    )
    (tmp_path / "my_code.py").write_text(OWN_CODE)
    toml = write_run(
        tmp_path,
        warm_start,
        use_lora="false",
        learning_rate=3e-4,
        my_mark=42.5,
        loss='"my_code:my_loss"',
        loss_args="{ scale = 0.5 }",
        advantage='"my_code:my_advantage"',
    )
    text = toml.read_text()
    assert text.count("[trainer]\n") == 1
    toml.write_text(text.replace("[trainer]\n", '[trainer]\nclass = "my_trainer:RLTrainer"\n'))
    command = [sys.executable, "-m", "verifiers_rl.cli.rl", "@", str(toml)]
    environment = {**os.environ, "VF_RL_TEST": str(tmp_path)}
    # From another folder than the TOML's, whose modules are found all the same.
    run_in_terminal(command, tmp_path, environment)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 2, 4]
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    own = {"my_mark": 42.5, "my_groups": 4.0, "my_scale": 0.5, "advantage_abs": 3.0}
    for name, expected in own.items():
        assert [row[name] for row in steps] == [expected] * 4
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert processes_of(tmp_path) == {}


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
    page = (ROOT / "docs" / "configuration.md").read_text()
    (tmp_path / "hosted.toml").write_text(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    (tmp_path / "secrets.env").write_text("JUDGE_NOTE=veiled-9431\n")
    module = (ROOT / "examples" / "reverse_text" / "reverse_text.py").read_text()
    (tmp_path / "reverse_text.py").write_text(module + SPY)
    own = 'id = "reverse_text"\nargs = { instruction = "", num_tasks = 64 }\n'
    (tmp_path / "here.toml").write_text(
        f"model = {json.dumps(str(warm_start))}\n[[env]]\n{own}only = 'train'\n"
        f"[[env]]\n{own.replace('64', '64, held_out = true')}only = 'eval'\n"
        "[inference]\ngpus = 0\n[inference.args]\n"
        'dtype = "float32"\nenforce_eager = true\nmax_num_seqs = 64\n[trainer]\ngpus = 0\n'
        f"[trainer.args]\nmax_seq_len = 64\nmax_tokens = 16\noutput_dir = '{tmp_path}/run'\n"
        f"vllm_server_port = {free_port()}\n"
    )
    files = [word for name in ("hosted", "here") for word in ("@", f"{name}.toml")]
    keys = ["--max_steps", "3", "--batch_size=32", "--eval.interval", "2", "--eval.num_examples=8"]
    done = subprocess.run(
        [sys.executable, "-m", "verifiers_rl.cli.rl", *files, *keys, "--no-tmux"],
        capture_output=True, text=True, timeout=500, cwd=tmp_path,
        env={
            **os.environ, "VF_RL_TEST": str(tmp_path), "PYTHONPATH": str(ROOT),
            "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    log = (tmp_path / "run" / "logs" / "inference.log").read_text()
    assert "Application startup complete" in log and "startup complete" not in done.stdout
    assert "completion" in done.stdout and "advantage" in done.stdout  # the table of rollouts
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    # kl_penalty: at the start the KL is 0, so its weight falls by 2 %.
    weights = [row["kl_beta"] for row in steps if "kl_beta" in row]
    assert weights[:2] == pytest.approx([0.01, 0.0098], rel=1e-6)
    evaluations = [row for row in rows if "eval_reward" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 3]  # the first, every second, the last
    assert [row["eval_num_rollouts"] for row in evaluations] == [16] * 3  # 8 examples, 2 each
    adapter = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (16, 32)
    assert list(tmp_path.rglob("run-*.wandb"))
    resolved = (tmp_path / "run" / "resolved.toml").read_text()
    assert "batch_size = 32\n" in resolved and "[sampling]" not in resolved
    # The environments' secrets: where they run, not in the server, nor in what the run leaves.
    seen = [path.read_text() for path in tmp_path.glob("seen-*")]
    assert "veiled-9431 True False" in seen
    assert all(text.startswith("veiled") for text in seen), seen
    assert not any(text.endswith("True True") for text in seen)
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(left) > 5 and not any(b"veiled-9431" in path.read_bytes() for path in left)
    assert "veiled-9431" not in done.stdout + done.stderr
    assert processes_of(tmp_path) == {}


def test_a_killed_vf_rl_leaves_no_process_behind(warm_start, tmp_path):
    toml = write_run(tmp_path, warm_start)
    process = subprocess.Popen(
        [sys.executable, "-m", "verifiers_rl.cli.rl", "@", str(toml), "--no-tmux"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "VF_RL_TEST": str(tmp_path)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(processes_of(tmp_path)) < 3:  # vf-rl, the server, vLLM's engine
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while processes_of(tmp_path):
        assert time.monotonic() < deadline, processes_of(tmp_path)
        time.sleep(0.2)


def teach(toml, model):
    """Mix the TOML's environment with rewards and the same one with a teacher, `model`."""
    text = toml.read_text()
    (env,) = re.findall(r"^\[env.*?(?=^\[inference\])", text, re.MULTILINE | re.DOTALL)
    one = env.removeprefix("[env]\n")
    taught = 'name = "taught"\nalgorithm = "opd"\nteacher = "same"\n'
    text = text.replace(env, f'[[env]]\nname = "rewarded"\n{one}[[env]]\n{taught}{one}')
    text += f'[[teacher]]\nname = "same"\nmodel = {json.dumps(str(model))}\n[teacher.args]\n'
    toml.write_text(text + 'dtype = "float32"\nenforce_eager = true\nmax_num_seqs = 64\n')


def test_vf_rl_starts_a_killed_teacher_and_a_killed_server_again_and_training_goes_on(
    warm_start, tmp_path
):
    options = {
        "max_steps": 12,
        "eval_on_start": "false",
        "eval_strategy": '"no"',
        "eval_steps": None,
    }
    toml = write_run(tmp_path, warm_start, **options)
    teach(toml, warm_start)
    command = [sys.executable, "-m", "verifiers_rl.cli.rl", "@", str(toml), "--no-tmux"]
    with (tmp_path / "output.log").open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VF_RL_TEST": str(tmp_path)},
            start_new_session=True,
        )

    def shown():
        return (tmp_path / "output.log").read_text(errors="replace")

    def wait_for_steps(number, deadline):
        while num_steps(tmp_path) < number:
            assert process.poll() is None and time.monotonic() < deadline, shown()
            time.sleep(0.2)

    try:
        wait_for_steps(2, time.monotonic() + 300)
        lines = processes_of(tmp_path)
        teachers = [pid for pid in server_pids(tmp_path) if "--max-model-len 65" in lines[pid]]
        (server,) = set(server_pids(tmp_path)) - set(teachers)
        (where,) = re.findall(r"starting teacher 'same' on (\S+),", shown())
        status = f"http://{where}/weight_sync/status"
        assert httpx.get(status, trust_env=False).status_code == 401
        trainer = next(pid for pid, line in lines.items() if "verifiers_rl.cli.train" in line)
        told = Path(f"/proc/{trainer}/environ").read_text()
        (key,) = re.findall(r"VERIFIERS_RL_TOKEN=([\w-]+)", told)
        assert not any(key in line for line in lines.values())
        (teacher,) = teachers
        before = num_steps(tmp_path)
        os.kill(teacher, signal.SIGKILL)
        # Two steps may have had their answers; the next one has them from the new teacher.
        wait_for_steps(before + 3, time.monotonic() + 300)
        os.kill(server, signal.SIGKILL)
        assert process.wait(300) == 0, shown()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert "teacher 'same' ended with status 137; starting it again in 1 s" in shown()
    assert "the server ended with status 137; starting it again in 1 s" in shown()
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, rows) if "reward" in row]
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
    for name in ("inference", "teacher-same"):
        log = tmp_path / "run" / "logs" / f"{name}.log"
        assert log.read_text().count("Application startup complete") == 2
    assert processes_of(tmp_path) == {}
