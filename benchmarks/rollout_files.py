"""What does a step lose by writing its rollouts? A batch of random rollouts, without a model.

    python benchmarks/rollout_files.py [--rollouts 512] [--length 1024] [--log-rollouts 0.05]

The trainer's thread hands the step to the writer's thread, which makes a table and writes it. Both
run under one interpreter lock, so the time of the writer's thread on the CPU is the most that the
trainer's can lose; most of it is pyarrow's, without the lock. Seconds are means over the steps
behind the first. Each step has a file of its own here.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
GROUP, PROMPT = 16, 64


def make_batch(num_rollouts: int, length: int, step: int):
    from verifiers_rl.json_text import as_json
    from verifiers_rl.types import Batch, Rollout, Sample

    rng = np.random.default_rng(step)
    text = "".join(chr(97 + i) for i in rng.integers(0, 26, 4 * length))  # 4 letters a token
    groups, samples = [], []
    for number in range(num_rollouts):
        token_ids = rng.integers(0, 256, PROMPT + length, dtype=np.int32)
        mask = np.arange(PROMPT + length) >= PROMPT
        sample = Sample(token_ids, mask, -rng.random(len(mask)), np.where(mask, step, -1))
        rollout = Rollout(number // GROUP, "?", text, samples=[sample], reward=float(rng.random()))
        sample.set_advantage(rollout.reward)
        messages = [{"role": "user", "content": "?" * 4 * PROMPT}]
        messages.append({"role": "assistant", "content": text})
        turn = {"message": 1, "begin_s": 0.0, "end_s": 9.0, "num_prompt_tokens": PROMPT}
        rollout.record = as_json({"begun_at": 1.0, "messages": messages, "turns": [turn]})
        if number % GROUP == 0:
            groups.append([])
        groups[-1].append(rollout)
        samples.append(sample)
    return Batch(step, step, samples, [r for g in groups for r in g], {}, groups=groups)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--log-rollouts", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    from examples.warm_start import make_tokenizer
    from tests.helpers import make_tiny_model
    from verifiers_rl.config import RLConfig
    from verifiers_rl.report import rollouts
    from verifiers_rl.report.recording import RunFiles

    rollouts.FILE_S = 0.0

    with tempfile.TemporaryDirectory() as folder:
        args = RLConfig(
            output_dir=folder, use_cpu=True, batch_size=options.rollouts,
            rollouts_per_example=GROUP, log_rollouts=options.log_rollouts,
        )  # fmt: skip
        trainer = SimpleNamespace(
            args=args, processing_class=make_tokenizer(), model=make_tiny_model(), batch=None,
            state=SimpleNamespace(global_step=0), orchestrator=None,
        )  # fmt: skip
        files, state = RunFiles(trainer), trainer.state
        batches = [make_batch(options.rollouts, options.length, step) for step in range(4)]
        on_trainer, on_writer, waited = [], [], []
        with files.open():
            files.on_train_begin(args, state, None)
            assert files._thread is not None and files._thread.thread.ident is not None
            clock = time.pthread_getcpuclockid(files._thread.thread.ident)
            for step in range(options.steps):
                trainer.batch = batches[step % 4]
                trainer.batch.step = step
                values = files.values_of(trainer.batch)
                if values is not None:
                    values.collect()
                state.global_step = step + 1
                files._wait()
                before, start = time.clock_gettime(clock), time.monotonic()
                files.on_step_end(args, state, None)
                on_trainer.append(time.monotonic() - start)
                files._wait()
                waited.append(time.monotonic() - start)
                on_writer.append(time.clock_gettime(clock) - before)
        size = sum(path.stat().st_size for path in Path(folder).glob("rollouts/*"))
    rows = options.rollouts * options.steps
    first = batches[0].rollouts[0]
    record = len(first.record) - len(first.completion) - 4 * PROMPT
    print(f"trainer's thread: {1e3 * np.mean(on_trainer[1:]):.2f} ms a step")
    print(
        f"writer's thread:  {1e3 * np.mean(on_writer[1:]):.1f} ms of CPU a step, "
        f"{1e3 * np.mean(waited[1:]):.1f} ms until it is written"
    )
    print(f"on disk: {size / rows:.0f} bytes a rollout")
    print(f"record: {record} bytes beside the text of prompt and reply")


if __name__ == "__main__":
    main()
