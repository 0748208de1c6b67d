"""Does an LM head in float32 bring trainer and server closer, where both compute in bfloat16?

    python benchmarks/head_dtype.py [--steps 20]

The task of examples/reverse_text from its warm start, all weights, bfloat16 on both sides, at a
learning rate of 0: the weights stay equal, so mismatch_kl is rounding alone. Each row: the head's
dtype in the server and in the trainer, the mean of mismatch_kl and the mean of the largest
importance ratio over the steps, and the median seconds of a step.
"""

import argparse
import contextlib
import io
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    import torch
    from ledger import REVERSE_TEXT, make_env

    from tests.conftest import running_server
    from verifiers_rl import RLConfig, RLTrainer
    from verifiers_rl.inference.client import TOKEN_VARIABLE

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    print("| server | trainer | mismatch_kl | largest ratio | step s |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        command = [sys.executable, str(ROOT / "examples" / "warm_start.py")]
        command += [str(REVERSE_TEXT / "reverse_text.py"), str(model)]
        subprocess.run(command, check=True, capture_output=True)
        for of_server in ("model", "float32"):
            flags = ("--max-num-seqs", "256", "--hf-overrides", f'{{"head_dtype": "{of_server}"}}')
            log = Path(folder, "log")
            with running_server(model, log, *flags, dtype="bfloat16") as server:
                for of_trainer in ("model", "float32"):
                    args = RLConfig(
                        output_dir=f"{folder}/run", overwrite_output_dir=True, use_cpu=True,
                        bf16=True, use_lora=False, learning_rate=0.0, max_steps=options.steps,
                        batch_size=128, rollouts_per_example=8, max_seq_len=64, max_tokens=16,
                        micro_batch_size=128, temperature=1.0, vllm_server_port=server.port,
                        save_strategy="no", logging_steps=1,
                        disable_tqdm=True, env_workers=0, head_dtype=of_trainer,
                    )  # fmt: skip
                    with contextlib.redirect_stdout(io.StringIO()):
                        trainer = RLTrainer(str(model), make_env("demo"), args)
                        trainer.train()
                    rows = [row for row in trainer.state.log_history if "step_s" in row]
                    means = [
                        statistics.mean(row[name] for row in rows)
                        for name in ("mismatch_kl", "importance_ratio_max")
                    ]
                    step_s = statistics.median(row["step_s"] for row in rows)
                    print(f"| {of_server} | {of_trainer} | {means[0]:.2e} | {means[1]:.3f} | "
                          f"{step_s:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
