"""Does generation hide behind training? Step time against the time of the slower of the two alone.

    python benchmarks/overlap.py [--steps 12]

The real `RLTrainer` and `Orchestrator` run on a small model. A stand-in for the server makes
rollouts of a given duration, and forward and backward sleep for a given duration. The bound is
max(generation, training) with batches ahead, and their sum without. In the last two rows one
rollout in 64 takes five times as long as the others, on a server with half as many places as a
batch has rollouts. There the bound is the work of a batch divided by the number of places.
"""

import argparse
import asyncio
import contextlib
import io
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
BATCH_SIZE, GROUP = 64, 8


class Server:
    """A GroupRunner whose rollouts take `seconds(number)`; `places` of them run at a time."""

    def __init__(self, seconds: Any, places: int = BATCH_SIZE) -> None:
        self.seconds = seconds
        self.places = places
        self.count = 0

    def sizes(self, split: str) -> list[int]:
        return [10_000]

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def run_group(self, split: str, index: int, num_rollouts: int, *args: Any) -> list[Any]:
        from tests.helpers import make_samples
        from verifiers_rl.types import Rollout

        slots = args[-1]

        async def one(number: int) -> Rollout:
            async with slots:
                await asyncio.sleep(self.seconds(number))
            rollout = Rollout(index, "", num_turns=1, samples=make_samples(1, seed=number))
            rollout.reward = float(number % 3)
            return rollout

        first, self.count = self.count, self.count + num_rollouts
        return await asyncio.gather(*(one(first + i) for i in range(num_rollouts)))


def step_time(server: Server, training_s: float, ahead: int, steps: int, folder: Path) -> float:
    """Return the median seconds between the ends of two steps, once the pipeline is full."""
    from tests.helpers import StubSink, load_example, make_tiny_model
    from verifiers_rl import Orchestrator, RLConfig, RLTrainer

    ends: list[float] = []

    class Sleeping(RLTrainer):
        """Forward and backward end training_s after the batch's arrival."""

        def _next_batch(self) -> Any:
            batch = super()._next_batch()
            self.arrival = time.perf_counter()
            return batch

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            time.sleep(max(training_s - (time.perf_counter() - self.arrival), 0))
            ends.append(time.perf_counter())
            return loss

    args = RLConfig(
        output_dir=str(folder), use_cpu=True, use_lora=False, max_steps=steps, save_strategy="no",
        batch_size=BATCH_SIZE, rollouts_per_example=GROUP, max_seq_len=32, micro_batch_size=512,
        max_off_policy_steps=ahead, logging_steps=steps, num_rollouts_to_print=0, disable_tqdm=True,
        overwrite_output_dir=True,
    )  # fmt: skip
    orchestrator = Orchestrator(
        server, lambda: None, batch_size=BATCH_SIZE, rollouts_per_example=GROUP,
        sampling_args={}, max_concurrent=server.places,
    )  # fmt: skip
    tokenizer = load_example("warm_start").make_tokenizer()
    trainer = Sleeping(
        make_tiny_model(), None, args, tokenizer, orchestrator=orchestrator, weight_sync=StubSink()
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return statistics.median(b - a for a, b in itertools.pairwise(ends[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| generation s | training s | batches ahead | step s | bound s | step / bound |")
    print("| --- | --- | --- | --- | --- | --- |")

    def row(name: str, server: Server, training_s: float, ahead: int, bound: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            measured = step_time(server, training_s, ahead, options.steps, Path(folder))
        print(
            f"| {name} | {training_s} | {ahead} | {measured:.3f} | {bound:.3f} | "
            f"{measured / bound:.3f} |",
            flush=True,
        )

    for generation_s, training_s in ((1.0, 0.5), (0.5, 1.0), (0.8, 0.8)):
        for ahead in (0, 1):
            server = Server(lambda number, s=generation_s: s)
            both = (generation_s, training_s)
            bound = max(both) if ahead else sum(both)
            row(str(generation_s), server, training_s, ahead, bound)
    for ahead in (1, 2):
        # 63 rollouts of 0.4 s and one of 2 s on 32 places.
        server = Server(lambda number: 2.0 if number % 64 == 60 else 0.4, places=32)
        row("0.4, one 2.0", server, 0.2, ahead, (63 * 0.4 + 2.0) / 32)


if __name__ == "__main__":
    main()
