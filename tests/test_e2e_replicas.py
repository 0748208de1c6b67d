"""One trainer with three real vLLM servers, and what may happen to them in a run."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby

import httpx
import pytest
from transformers import TrainerCallback

from tests.helpers import load_example, worker_pids, write_model
from tests.troubled_env import num_letters
from verifiers_rl import RLConfig, RLTrainer, env_from

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    model = load_example("warm_start").make_model(tokenizer)
    return write_model(tmp_path_factory.mktemp("model"), model)


@pytest.fixture(scope="module")
def servers(model_folder, run_server):
    with ExitStack() as stack, ThreadPoolExecutor(3) as threads:
        made = [run_server(model_folder) for _ in range(3)]
        yield list(threads.map(stack.enter_context, made))


def num_running(server):
    """How many requests the server computes, by its own account."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=10).text
    return float(re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)[1])


def test_a_run_outlives_a_server_and_a_worker_and_uses_a_server_that_comes_back(
    servers, model_folder, run_server, tmp_path
):
    trainer = RLTrainer(
        model_folder,
        env_from([f"question {i}" for i in range(8)], num_letters),
        RLConfig(
            output_dir=f"{tmp_path}/run", use_cpu=True, batch_size=32, rollouts_per_example=8,
            max_seq_len=96, max_tokens=64, learning_rate=1e-2, max_steps=3000, save_strategy="no",
            vllm_servers=[f"127.0.0.1:{server.port}" for server in servers], env_workers=1,
            max_off_policy_steps=0, use_lora=False, log_rollouts=0,
        ),
    )  # fmt: skip
    batches, killed = [], []
    deadline = time.monotonic() + 400

    def kill_when_it_generates(server, pid):
        while not num_running(server):
            assert time.monotonic() < deadline
            time.sleep(0.005)  # the server tells nobody when it begins
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    def num_serving():
        return sum(r.policy_version is not None for r in trainer.weight_sync.replicas)

    def happen(stack, threads):
        """What happens between the steps."""
        yield from range(3)  # pushes after which both sides are compared, which is no rollout
        server = servers[1]
        threads.submit(kill_when_it_generates, server, server.process.pid)
        while num_serving() == 3:
            yield
        yield
        # Between two steps, which would take the cores from it.
        stack.enter_context(run_server(model_folder, port=server.port))
        while num_serving() < 3:
            yield
        yield
        threads.submit(kill_when_it_generates, servers[0], worker_pids()[0])
        while len(killed) < 2:
            yield
        yield from range(2)

    class Story(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert time.monotonic() < deadline, killed
            batches.append(trainer.batch)
            control.should_training_stop = next(story, "the end") == "the end"

    trainer.add_callback(Story())
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        story = happen(stack, threads)
        trainer.train()
    rows = [row for row in trainer.state.log_history if "num_servers" in row]
    assert len(rows) == len(batches)
    assert [number for number, _ in groupby(row["num_servers"] for row in rows)] == [3, 2, 3]
    # What was lost is counted, where it was lost, and nothing fails by it.
    (moved,) = (i for i, row in enumerate(rows) if row["moved_share"] > 0)
    (restarted,) = (i for i, row in enumerate(rows) if row["restarted_share"] > 0)
    assert rows[moved]["num_servers"] == 3 and restarted > moved + 1
    assert {row["error_share"] for row in rows} == {0}
    # What the servers say: all tokens are of the weights that train on them.
    for step, batch in enumerate(batches):
        assert len(batch.rollouts) == 32
        for sample in batch.samples:
            assert {*sample.policy_versions.tolist()} == {-1, step}
    # And what their logprobs say, which differ from weights to weights.
    assert max(row["mismatch_kl"] for row in rows) < 1e-6
