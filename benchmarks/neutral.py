"""Did a change alter what is learned? Losses, rewards and a SHA-256 of the weights.

    python benchmarks/neutral.py --write before.json          # on the commit before a change
    python benchmarks/neutral.py --compare before.json        # after it; exit status 1 if unequal
    python benchmarks/neutral.py --standin ...                # only cases without a server

Each case is a synchronous run of 20 steps with a fixed seed and one thread: LoRA and all weights,
on one rank and on two.

stand-in: the real `RLTrainer` and `Orchestrator` on rollouts that follow from a seed. Everything
but the server takes part: groups, advantages, packing, ranks, loss, masks, optimizer.
server: the same with the real `vf-vllm`, one request at a time, each with a seed. So the server
computes the same batches again, and its tokens and logprobs are equal to the last bit. Another
version of vLLM may round in another way: its first difference is then a loss of step 0 or 1 in the
seventh digit.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
NUM_STEPS, BATCH_SIZE, GROUP = 20, 16, 4
CASES = [
    f"{source} {weights} {ranks}"
    for source in ("stand-in", "server")
    for weights in ("lora", "full")
    for ranks in (1, 2)
]


def make_standin(args: Any) -> Any:
    """Return an `Orchestrator` whose rollouts follow from example, place in the group and step."""
    from tests.helpers import StubRunner, make_samples
    from verifiers_rl import Orchestrator

    class Runner(StubRunner):
        async def run_group(self, request: Any) -> Any:
            number = len(self.seen)
            group = await super().run_group(request)
            for i, rollout in enumerate(group):
                rng = random.Random(1000 * number + i)
                rollout.samples = make_samples(rng.randint(1, 2), seed=rng.randrange(10**6))
                rollout.reward = rng.random()
            return group

    return Orchestrator(Runner(1000), args, lambda: None)


def make_env() -> Any:
    """Return an environment that wants lower-case letters."""
    from verifiers_rl import env_from

    def reward(completion: str) -> float:
        return sum(c.islower() for c in completion) / max(len(completion), 1)

    return env_from([{"prompt": f"letters {i:04d}"} for i in range(1000)], reward)


def run_case(case: str, model: str, port: int, folder: str) -> dict[str, Any] | None:
    """Train in this process, one of the case's ranks; rank 0 returns what came out."""
    import torch

    from tests.helpers import StubSink
    from verifiers_rl import RLConfig, RLTrainer

    torch.set_num_threads(1)
    losses: list[float] = []
    rewards: list[float] = []

    class Recording(RLTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            assert self.batch is not None
            rewards.extend(rollout.reward for rollout in self.batch.rollouts)
            return loss

    source, weights, _ = case.split()
    options: dict[str, Any] = {}
    replaced: dict[str, Any] = {}
    if source == "server":
        options = {"vllm_server_port": port, "max_tokens": 8, "temperature": 1.0}
        options |= {"max_concurrent": 1, "env_workers": 0, "deterministic": True}
    args = RLConfig(
        output_dir=f"{folder}/{case.replace(' ', '-')}", use_cpu=True, use_lora=weights == "lora",
        learning_rate=1e-3, max_steps=NUM_STEPS, save_strategy="no", batch_size=BATCH_SIZE,
        rollouts_per_example=GROUP, micro_batch_size=1, max_seq_len=64, max_off_policy_steps=0,
        disable_tqdm=True, **options,
    )  # fmt: skip
    env = None
    if source == "stand-in":
        replaced = {"orchestrator": make_standin(args), "weight_sync": StubSink()}
    else:
        env = make_env()
    trainer = Recording(model, env, args, **replaced)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    if args.process_index:
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(
        trainer.accelerator.unwrap_model(trainer.model).state_dict().items()
    ):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return {"losses": losses, "rewards": rewards, "weights": digest.hexdigest()}


def run_ranks(case: str, model: str, port: int, folder: str) -> dict[str, Any]:
    """Run a case in processes of its own, one for each rank."""
    ranks, result = case.split()[-1], Path(folder, "result.json")
    own = [__file__, "--case", case, "--model", model, "--port", str(port), "--folder", folder]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    launch = launch if ranks != "1" else []
    done = subprocess.run(
        [sys.executable, *launch, *own], capture_output=True, text=True, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-4000:]}")
    return json.loads(result.read_text())


@contextlib.contextmanager
def serving(model: str, folder: str, case: str) -> Iterator[int]:
    """Give the port of a vf-vllm for the weights of this case; 0 if it needs none."""
    from tests.conftest import running_server

    source, weights, _ = case.split()
    if source == "stand-in":
        yield 0
        return
    flags = ["--no-enable-chunked-prefill"]
    flags += ["--enable-lora", "--max-lora-rank", "16"] if weights == "lora" else []
    with running_server(Path(model), Path(folder, "server.log"), *flags) as server:
        yield server.port


def difference(before: dict[str, Any] | None, after: dict[str, Any]) -> str:
    """Return "equal", or the first place where two results of a case differ."""
    if before is None:
        return "not in the file"
    for name in ("rewards", "losses"):
        pairs = list(zip(before[name], after[name], strict=True))
        for i, (old, new) in enumerate(pairs):
            if old != new:
                step = i // BATCH_SIZE if name == "rewards" else i
                largest = max(abs(x - y) for x, y in pairs)
                return (
                    f"{name} differ from step {step} on: {old!r}, {new!r}; by up to {largest:.2g}"
                )
    return "equal" if before["weights"] == after["weights"] else "the weights differ"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="the file to write the results to")
    parser.add_argument("--compare", type=Path, help="a file of an earlier run")
    parser.add_argument("--standin", action="store_true", help="without the real server")
    for name in ("case", "model", "folder"):  # of one rank's process
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        result = run_case(options.case, options.model, options.port, options.folder)
        if result is not None:
            Path(options.folder, "result.json").write_text(json.dumps(result))
        return

    import torch

    from tests.helpers import load_example
    from verifiers_rl.inference.client import TOKEN_VARIABLE

    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(16))
    cases = [case for case in CASES if not (options.standin and case.startswith("server"))]
    earlier = json.loads(options.compare.read_text()) if options.compare else {}
    results = {}
    print("| case | loss of the first and last step | mean reward of both | weights | compared |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        torch.manual_seed(0)
        warm_start = load_example("warm_start")
        tokenizer = warm_start.make_tokenizer()
        tokenizer.save_pretrained(model)
        warm_start.make_model(tokenizer).save_pretrained(model)
        for case in cases:
            with serving(model, folder, case) as port:
                results[case] = result = run_ranks(case, model, port, folder)
            losses, rewards = result["losses"], result["rewards"]
            first, last = sum(rewards[:BATCH_SIZE]), sum(rewards[-BATCH_SIZE:])
            compared = difference(earlier.get(case), result) if options.compare else "-"
            result["compared"] = compared
            print(
                f"| {case} | {losses[0]:.7f}, {losses[-1]:.7f} | {first / BATCH_SIZE:.4f}, "
                f"{last / BATCH_SIZE:.4f} | {result['weights'][:16]} | {compared} |",
                flush=True,
            )
    if options.write:
        options.write.write_text(json.dumps(results))
    if options.compare:
        raise SystemExit(any(result["compared"] != "equal" for result in results.values()))


if __name__ == "__main__":
    main()
