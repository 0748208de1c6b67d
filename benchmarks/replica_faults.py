"""Faults in a run with three real servers of a tiny model, on this machine's CPU.

    python benchmarks/replica_faults.py [FOLDER]

Server 2 starts only when training has begun. Server 0 is killed while it generates, server 1 in
the middle of a push; both are started again. The run goes on until all three serve again. At the
end, the versions in the servers' replies are compared with those that the steps trained on, and
the logprobs of both sides with each other. It takes some minutes and 6 GB.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from tests.conftest import free_port, running_server
from tests.helpers import load_example, make_env, make_tiny_model
from verifiers_rl import RLConfig, RLTrainer
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.inference.pool import State
from verifiers_rl.sync import buckets

MAX_STEPS = 2000


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(TOKEN_VARIABLE, "a token of this benchmark only")
    model = folder / "model"
    config = make_tiny_model().config.to_dict()
    config |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"head_dim": 32, "max_position_embeddings": 256}
    Qwen3ForCausalLM(Qwen3Config.from_dict(config)).save_pretrained(model)
    load_example("warm_start").make_tokenizer().save_pretrained(model)
    ports = [free_port() for _ in range(3)]
    events: list[str] = []
    begin = time.monotonic()
    with ExitStack() as stack:
        alive: dict[int, Any] = {}

        def tell(what: str) -> None:
            events.append(f"{time.monotonic() - begin:6.1f} s  {what}")
            print(events[-1], flush=True)

        def start(number: int) -> None:
            if number in alive:
                alive[number].process.wait()
            log = folder / f"server-{number}-{len(events)}.log"
            alive[number] = stack.enter_context(running_server(model, log, port=ports[number]))
            tell(f"server {number} answers")

        for number in (0, 1):
            start(number)
        env = make_env({f"question {i}": "" for i in range(8)}, lambda q, reply, a: len(set(reply)))
        args = RLConfig(
            output_dir=str(folder / "run"), use_cpu=True, batch_size=32, rollouts_per_example=8,
            max_seq_len=96, max_tokens=48, learning_rate=1e-2, max_steps=MAX_STEPS,
            save_strategy="no", vllm_servers=[f"127.0.0.1:{port}" for port in ports],
            vllm_server_timeout=20, max_off_policy_steps=0, use_lora=False, log_rollouts=False,
            num_rollouts_to_print=0, overwrite_output_dir=True, logging_steps=1,
        )  # fmt: skip
        trainer = RLTrainer(str(model), env, args)
        pool: Any = trainer.weight_sync
        pool.timeout_s = 300.0
        take, send, todo = pool.take, buckets._send, {"late", "generating", "push"}
        threads: list[threading.Thread] = []

        def later(number: int) -> None:
            threads.append(threading.Thread(target=start, args=(number,), daemon=True))
            threads[-1].start()

        def kill(number: int, when: str) -> None:
            os.kill(alive[number].process.pid, signal.SIGKILL)
            tell(f"server {number} is killed {when}")
            later(number)

        def taking(version: int) -> str:
            url = take(version)
            if version >= 3 and url == pool.replicas[0].url and "generating" in todo:
                todo.discard("generating")
                threading.Timer(0.05, kill, (0, f"while it generates for step {version}")).start()
            return url

        def sending(transport: Any, buffer: Any) -> None:
            step = trainer.state.global_step
            ready = "generating" not in todo and pool.replicas[0].state == State.SERVING
            of_1 = pool.replicas[1].sync is not None and (
                pool.replicas[1].sync._transport is transport
            )
            if ready and of_1 and "push" in todo:
                todo.discard("push")
                kill(1, f"in the push of step {step}")
            send(transport, buffer)

        pool.take, buckets._send = taking, sending
        wrong: list[int] = []
        num_serving: list[int] = []

        class Watch(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                step = state.global_step - 1
                for sample in trainer.batch.samples:  # type: ignore[union-attr]
                    if {*sample.policy_versions.tolist()} != {-1, step}:
                        wrong.append(step)
                now = sum(replica.state == State.SERVING for replica in pool.replicas)
                if not num_serving or num_serving[-1] != now:
                    tell(f"step {step}: {now} of 3 serve")
                num_serving.append(now)
                if "late" in todo:
                    todo.discard("late")
                    later(2)
                control.should_training_stop = not todo and now == 3

        trainer.add_callback(Watch())
        trainer.train()
        rows = [row for row in trainer.state.log_history if "num_servers" in row]
        moved = {i: row["moved_share"] for i, row in enumerate(rows) if row["moved_share"]}
        print(
            f"{len(rows)} steps; servers of each push: {sorted({r['num_servers'] for r in rows})}"
        )
        print(f"steps with rollouts that began again, and their share: {moved}")
        print(f"rollouts that failed: {sum(row['error_share'] for row in rows) * 32:g}")
        print(f"samples with a token of another version: {len(wrong)}")
        print(f"largest mismatch_kl: {max(row['mismatch_kl'] for row in rows):.2g}")
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
