"""Does generation hide behind training? Step time against the time of the slower of the two alone.

    python benchmarks/overlap.py [--steps 12] [--only base|ahead|evaluation]

The real `RLTrainer` and `Orchestrator` run on a small model. A stand-in for the server makes
rollouts of a given duration, and forward and backward sleep for a given duration.

base: the bound is max(generation, training) with batches ahead, and their sum without.
ahead: one rollout in 64 takes five times as long as the others, on a server with half as many
places as a batch has rollouts, with 1 to 4 batches ahead. The bound is the work of a batch divided
by the number of places. A second bound follows from the staleness that is allowed: a rollout that
begins with the weights of step v must be complete when step v + k takes its batch.
evaluation: one every second step, beside training and as a blocking one, over none.
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
    """An EnvRunner whose rollouts take `seconds(number)`; `places` of them run at a time."""

    weights = (1.0,)

    def __init__(self, seconds: Any, places: int = BATCH_SIZE) -> None:
        self.seconds = seconds
        self.places = places
        self.count = 0

    def sizes(self, split: str) -> list[int]:
        return [10_000]

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def run_group(self, request: Any) -> list[Any]:
        from tests.helpers import make_samples
        from verifiers_rl.types import Rollout

        async def one(place: int, number: int) -> Rollout:
            async with request.begin(place):
                await asyncio.sleep(self.seconds(number if request.split == "train" else 0))
            rollout = Rollout(request.index, "", num_turns=1, samples=make_samples(1, seed=number))
            rollout.reward = float(number % 3)
            return rollout

        first = self.count
        if request.split == "train":
            self.count += request.num_rollouts
        return await asyncio.gather(*(one(i, first + i) for i in range(request.num_rollouts)))


def step_times(
    server: Server,
    training_s: float,
    ahead: int,
    steps: int,
    **options: Any,
) -> list[float]:
    """Return the seconds between the ends of two steps, while the pipeline is full.

    Args:
        options: of `RLConfig`.
    """
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

    folder = tempfile.TemporaryDirectory()
    args = RLConfig(
        output_dir=folder.name, use_cpu=True, use_lora=False, max_steps=steps, save_strategy="no",
        batch_size=BATCH_SIZE, rollouts_per_example=GROUP, max_seq_len=32, micro_batch_size=512,
        max_off_policy_steps=ahead, logging_steps=steps, disable_tqdm=True,
        max_concurrent=server.places, **options,
    )  # fmt: skip
    orchestrator = Orchestrator(server, args, lambda: None)
    tokenizer = load_example("warm_start").make_tokenizer()
    trainer = Sleeping(
        make_tiny_model(), None, args, tokenizer, orchestrator=orchestrator, weight_sync=StubSink()
    )
    with folder, contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    full = ends[2 : len(ends) - max(ahead - 1, 0)]  # in the last steps nothing new is begun
    return [after - before for before, after in itertools.pairwise(full)]


def base(steps: int) -> None:
    print("| generation s | training s | batches ahead | step s | bound s | step / bound |")
    print("| --- | --- | --- | --- | --- | --- |")
    for generation_s, training_s in ((1.0, 0.5), (0.5, 1.0), (0.8, 0.8)):
        for ahead in (0, 1):
            server = Server(lambda number, s=generation_s: s)
            both = (generation_s, training_s)
            bound = max(both) if ahead else sum(both)
            step_s = statistics.median(step_times(server, training_s, ahead, steps))
            print(
                f"| {generation_s} | {training_s} | {ahead} | {step_s:.3f} | {bound:.3f} | "
                f"{step_s / bound:.3f} |",
                flush=True,
            )


def ahead(steps: int) -> None:
    usual_s, slow_s, training_s, places = 0.4, 2.0, 0.2, 32
    bound = (63 * usual_s + slow_s) / places
    print(f"63 rollouts of {usual_s} s, one of {slow_s} s, {places} places; bound {bound:.3f} s")
    print("| batches ahead | bound by staleness s | step s | / bound |")
    print("| --- | --- | --- | --- |")
    for number in (1, 2, 3, 4):
        server = Server(lambda number: slow_s if number % 64 == 60 else usual_s, places)
        step_s = statistics.mean(step_times(server, training_s, number, steps))
        row = f"| {number} | {slow_s / number:.3f} | {step_s:.3f} | {step_s / bound:.3f} |"
        print(row, flush=True)


def evaluation(steps: int) -> None:
    print("An evaluation of 32 rollouts every second step")
    print("| generation s | training s | places | none s | beside s | / none | blocking | / none |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    every_second = {"eval_strategy": "steps", "eval_steps": 2, "eval_examples": 32}
    for generation_s, training_s, places in ((0.5, 1.0, 64), (0.8, 0.8, 96), (0.8, 0.8, 64)):

        def mean(s: float = generation_s, places: int = places, t: float = training_s,
                 **options: Any) -> float:  # fmt: skip
            return statistics.mean(step_times(Server(lambda number: s, places), t, 1, steps,
                                              **options))  # fmt: skip

        none, beside = mean(), mean(**every_second)
        blocking = mean(**every_second, metric_for_best_model="reward")
        print(
            f"| {generation_s} | {training_s} | {places} | {none:.3f} | {beside:.3f} | "
            f"{beside / none:.3f} | {blocking:.3f} | {blocking / none:.3f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=("base", "ahead", "evaluation"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for table in (base, ahead, evaluation):
        if options.only in (None, table.__name__):
            table(options.steps)
            print()


if __name__ == "__main__":
    main()
