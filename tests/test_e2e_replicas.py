"""One trainer and two real vLLM servers, of which one is killed. A third one joins the run."""

import os
import signal
import threading
from contextlib import ExitStack

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from tests.conftest import running_server
from tests.helpers import load_example, make_env, make_tiny_model
from verifiers_rl import RLConfig, RLTrainer
from verifiers_rl.inference.pool import State

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = make_tiny_model().config.to_dict()  # with heads that vLLM's CPU kernels take
    config |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"head_dim": 32, "max_position_embeddings": 256}
    Qwen3ForCausalLM(Qwen3Config.from_dict(config)).save_pretrained(folder)
    load_example("warm_start").make_tokenizer().save_pretrained(folder)
    return folder


def start(stack, model_folder, log, *flags):
    return stack.enter_context(running_server(model_folder, log, *flags))


@pytest.fixture(scope="module")
def servers(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        found = {}
        threads = [
            threading.Thread(
                target=lambda n=n: found.update(
                    {n: start(stack, model_folder, folder / f"{n}.log")}
                )
            )
            for n in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield [found[0], found[1]]


def test_a_run_goes_on_without_a_killed_server_and_uses_one_that_joins(
    servers, model_folder, tmp_path
):
    env = make_env({f"question {i}": "" for i in range(8)}, lambda q, reply, a: len(set(reply)))
    trainer = RLTrainer(
        str(model_folder),
        env,
        RLConfig(
            output_dir=str(tmp_path / "run"), use_cpu=True, batch_size=16, rollouts_per_example=8,
            max_seq_len=64, max_tokens=16, learning_rate=1e-2, max_steps=3000, save_strategy="no",
            vllm_servers=[f"127.0.0.1:{server.port}" for server in servers],
            max_off_policy_steps=0, use_lora=False, num_rollouts_to_print=0, log_rollouts=False,
        ),
    )  # fmt: skip
    pool, take, killed, batches = trainer.weight_sync, trainer.weight_sync.take, [], []

    def take_and_kill(policy_version):
        url = take(policy_version)
        if policy_version == 2 and url == servers[1].url and not killed:
            killed.append(policy_version)
            os.kill(servers[1].process.pid, signal.SIGKILL)  # this rollout has not begun
        return url

    pool.take = take_and_kill
    stack, joined = ExitStack(), []

    def bring_another():
        flags = ("--join", servers[0].url)
        joined.append(start(stack, model_folder, tmp_path / "joined.log", *flags))

    bringing = threading.Thread(target=bring_another, daemon=True)

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            batches.append(trainer.batch)
            if killed and bringing.ident is None:
                bringing.start()
            states = [replica.state for replica in pool.replicas]
            control.should_training_stop = states == [State.SERVING, State.DEAD, State.SERVING]

    trainer.add_callback(Watch())
    with stack:
        trainer.train()
        bringing.join()
    rows = [row for row in trainer.state.log_history if "num_servers" in row]
    num_servers = [row["num_servers"] for row in rows]
    assert num_servers[:3] == [2, 2, 2] and num_servers[3] == 1 and num_servers[-1] == 2
    assert rows[2]["moved_share"] > 0 and rows[2]["error_share"] == 0
    assert sum(row["moved_share"] for row in rows) == rows[2]["moved_share"]
    assert pool.replicas[2].url == joined[0].url
    # What the servers say: all tokens are of the weights that train on them.
    for step, batch in enumerate(batches):
        assert len(batch.rollouts) == 16
        for sample in batch.samples:
            assert {*sample.policy_versions.tolist()} == {-1, step}
    # And what their logprobs say, which differ from weights to weights.
    assert max(row["mismatch_kl"] for row in rows) < 1e-6
