"""Does the example learn? `make demo` for LoRA and for all weights, over several seeds.

    python benchmarks/learning.py [--seeds 0 1 2] [--modes lora full] [--steps 150]
        [--folder outputs/learning]

The seed determines the warm start and the training. Each run prints a row: exact match and mean
reward on 256 held-out prompts (one answer each, sampled at temperature 1) before and after
training, seconds of the warm start and of `vf-rl` (server start, training and evaluation), and
median seconds of a step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "reverse_text"
OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"use_lora": False, "learning_rate": 3e-4},
}


def write_toml(config: dict[str, Any], path: Path) -> None:
    """Write tables of strings, numbers and booleans, which TOML and JSON spell alike."""
    lines: list[str] = []

    def table(name: str, values: dict[str, Any]) -> None:
        lines.append(f"[{name}]" if name else "")
        lines.extend(f"{k} = {json.dumps(v)}" for k, v in values.items() if not isinstance(v, dict))
        for key, value in values.items():
            if isinstance(value, dict):
                table(f"{name}.{key}" if name else key, value)

    table("", config)
    path.write_text("\n".join(lines) + "\n")


def run(
    mode: str, seed: int, steps: int, folder: Path, changes: dict[str, dict[str, Any]] | None = None
) -> dict[str, float]:
    """Make the model if the folder has none, train it, and return what came out.

    Args:
        changes: values of the TOML's tables, by the table's name.
    """
    model = folder / f"warm_start_{seed}"
    start = time.monotonic()
    if not model.exists():
        command = [sys.executable, str(EXAMPLE.parent / "warm_start.py")]
        command += [str(EXAMPLE / "reverse_text.py"), str(model), "--seed", str(seed)]
        subprocess.run(command, check=True, capture_output=True)
    warm_start_s = time.monotonic() - start
    config = tomllib.loads((EXAMPLE / "rl.toml").read_text())
    output = folder / f"{mode}_{seed}"
    output.mkdir(parents=True, exist_ok=True)
    config["model"] = str(model)
    own = {"seed": seed, "max_steps": steps, "output_dir": str(output)}
    config["trainer"]["args"] |= own | OPTIONS[mode]
    for name, values in (changes or {}).items():
        table = config
        for key in name.split("."):
            table = table[key]
        table |= values
    write_toml(config, output / "rl.toml")
    (output / "reverse_text.py").write_text((EXAMPLE / "reverse_text.py").read_text())
    start = time.monotonic()
    with (output / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "verifiers_rl.cli.rl", "@", str(output / "rl.toml")]
        subprocess.run([*command, "--overwrite"], check=True, stdout=log, stderr=subprocess.STDOUT)
    run_s = time.monotonic() - start
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "eval_reward" in row]
    return {
        "exact_before": evaluations[0]["eval_exact_match"],
        "exact_after": evaluations[-1]["eval_exact_match"],
        "reward_before": evaluations[0]["eval_reward"],
        "reward_after": evaluations[-1]["eval_reward"],
        "warm_start_s": warm_start_s,
        "vf_rl_s": run_s,
        "step_s": statistics.median(row["step_s"] for row in rows if "step_s" in row),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--modes", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "learning")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    header: list[str] | None = None
    for seed in options.seeds:
        for mode in options.modes:
            result = run(mode, seed, options.steps, options.folder.absolute())
            if header is None:
                header = list(result)
                print("| mode | seed |", " | ".join(header), "|")
                print("|", " | ".join(["---"] * (len(header) + 2)), "|")
            values = " | ".join(f"{result[name]:.3g}" for name in header)
            print(f"| {mode} | {seed} | {values} |", flush=True)


if __name__ == "__main__":
    main()
