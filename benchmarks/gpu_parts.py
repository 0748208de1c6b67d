"""The checks of gpu_check.py that no other script runs. Each prints a line `figure: ...`.

    python benchmarks/gpu_parts.py demo --folder FOLDER [--one-gpu [--sleep]] [--mode full]
    python benchmarks/gpu_parts.py sharded ddp|fsdp2|zero2|zero3|cpu [--bf16]

demo: the example of `make demo` with its server on a GPU, in bfloat16; its mean reward must rise.
sharded: 3 steps of a small model on 2 ranks, or the CPU, against one GPU; in float32 the weights
must be the same, in bfloat16 nearly. Where there is one GPU, both ranks have it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
NUM_STEPS = 3
# Of the difference between both sets of weights, over the size of the update.
LARGEST, LARGEST_BF16 = 1e-3, 0.5


def demo(options: argparse.Namespace) -> None:
    from learning import run

    if options.one_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = first_gpu()
    flags = {
        "dtype": "bfloat16" if options.server_gpus else "float32",
        "enforce_eager": not options.graphs,
    }
    if options.server_gpus > 1:
        flags["tensor_parallel_size"] = options.server_gpus
    if options.sleep:
        flags["enable_sleep_mode"] = True
    changes = {
        "inference": {"gpus": options.server_gpus},
        "inference.args": flags,
        "trainer": {"gpus": options.trainer_gpus},
        "trainer.args": {"weight_sync_backend": options.backend},
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.absolute()
    log = folder / f"{options.mode}_0" / "log.txt"
    log.unlink(missing_ok=True)
    try:
        found = run(options.mode, 0, options.steps, folder, changes)
    except subprocess.CalledProcessError as error:
        print(log.read_text(errors="replace")[-8000:] if log.exists() else error.stdout)
        raise
    lines = (log.parent / "metrics.jsonl").read_text().splitlines()
    sync_s = [row["sync_s"] for row in map(json.loads, lines) if "sync_s" in row]
    print(
        f"figure: reward {found['reward_before']:.3f} -> {found['reward_after']:.3f}, "
        f"{found['step_s']:.3f} s a step, sync {statistics.median(sync_s):.4f} s"
    )
    if options.one_gpu and "one GPU for the server and the trainer" not in log.read_text():
        sys.exit("they did not share a GPU")
    if not found["reward_after"] > found["reward_before"]:
        sys.exit("the reward did not rise")


def train(path: Path, bf16: bool) -> None:
    """Train on this rank; rank 0 writes the weights that a server would get."""
    import torch

    if 1 == torch.cuda.device_count() < int(os.environ.get("WORLD_SIZE", 1)):
        from weight_sync import as_on_another_machine

        os.environ |= {"LOCAL_RANK": "0"} | as_on_another_machine(os.environ["RANK"])
    from examples.warm_start import make_tokenizer
    from tests.helpers import StubSink, StubSource, make_tiny_model, packed_weights
    from verifiers_rl import RLConfig, RLTrainer
    from verifiers_rl.sync.sources import what_to_send

    class Sink(StubSink):
        def push(self, model: Any, policy_version: int) -> dict[str, float]:
            sources, _ = what_to_send(model, "merged")
            weights = packed_weights(sources, model)
            weights = {name: weight.float().cpu() for name, weight in weights.items()}
            torch.save(weights, path)
            return super().push(model, policy_version)

    with tempfile.TemporaryDirectory() as folder:
        args = RLConfig(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            bf16=bf16,
            use_lora=False,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            micro_batch_size=4,
            max_seq_len=64,
            max_steps=NUM_STEPS,
            save_strategy="no",
            disable_tqdm=True,
        )
        RLTrainer(
            make_tiny_model(), None, args, make_tokenizer(),
            orchestrator=StubSource(), weight_sync=Sink(),
        ).train()  # fmt: skip


def launcher(kind: str) -> list[str]:
    """Return the command that starts a script on 2 ranks, or for "cpu" on one."""
    import torch

    if kind == "cpu":
        return [sys.executable]

    if not torch.cuda.is_available() and kind == "ddp":
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--main_process_port", "0"]  # a free one
    if kind == "ddp":
        return [*command, "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"]
    return [*command, "--config_file", f"examples/accelerate/{kind}.yaml"]


def sharded(options: argparse.Namespace) -> None:
    import torch

    from tests.helpers import make_tiny_model

    start = {name: p.detach() for name, p in make_tiny_model().named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        trained = []
        for name, command, env in (
            ("one", [sys.executable], {"CUDA_VISIBLE_DEVICES": first_gpu()}),
            (
                options.kind,
                launcher(options.kind),
                {"CUDA_VISIBLE_DEVICES": ""} if options.kind == "cpu" else {},
            ),
        ):
            path = Path(folder) / name
            subprocess.run(
                [*command, __file__, "train", str(path), *["--bf16"] * options.bf16],
                check=True,
                cwd=ROOT,
                env={**os.environ, **env},
            )
            trained.append(torch.load(path))
    one, split = trained
    if one.keys() != split.keys():
        sys.exit(f"other tensors: {one.keys() ^ split.keys()}")
    error = sum((one[name] - split[name]).square().sum().item() for name in one)
    norm = sum((one[name] - start[name]).square().sum().item() for name in one)
    value = (error / norm) ** 0.5
    print(f"figure: difference / update after {NUM_STEPS} steps: {value:.2g}")
    largest = LARGEST_BF16 if options.bf16 else LARGEST
    if not norm or not value <= largest:
        sys.exit(f"the weights differ by more than {largest:g} of the update")


def first_gpu() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("demo")
    one.add_argument("--folder", type=Path, required=True)
    one.add_argument("--mode", choices=["lora", "full"], default="lora")
    one.add_argument("--steps", type=int, default=100)
    one.add_argument("--server-gpus", type=int, default=1, help="0: a CPU, in float32")
    one.add_argument("--trainer-gpus", type=int, default=1)
    one.add_argument("--one-gpu", action="store_true", help="both sides share the first one")
    one.add_argument("--sleep", action="store_true", help="the server sleeps in each step")
    one.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    one.add_argument("--backend", choices=["auto", "nccl", "http"], default="auto")
    two = parts.add_parser("sharded")
    two.add_argument("kind", choices=["ddp", "fsdp2", "zero2", "zero3", "cpu"])
    two.add_argument("--bf16", action="store_true")
    three = parts.add_parser("train")
    three.add_argument("path", type=Path)
    three.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    if options.part == "demo":
        demo(options)
    elif options.part == "sharded":
        sharded(options)
    else:
        train(options.path, options.bf16)


if __name__ == "__main__":
    main()
