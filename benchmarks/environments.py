"""Do environments of others play? Two steps of each with a tiny model of random weights.

    python benchmarks/environments.py [--only kuhn_poker] [--folder outputs/environments]

Prints a row for each of `ENVIRONMENTS`: mean reward, share of rollouts with an error, turns and the
agents, or the command that installs it. Exit status 1 if one that is installed has not played.
"""

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from learning import ROOT, write_toml

sys.path.insert(0, str(ROOT / "examples"))
from warm_start import make_model, make_tokenizer

sys.path.pop(0)  # or the folders of examples would pass for installed environments
REPOSITORY = "git+https://github.com/PrimeIntellect-ai/verifiers@v0.4.0#subdirectory=environments/"
# Each with what its table needs beside the id of its taskset.
ENVIRONMENTS: dict[str, dict] = {
    "kuhn_poker": {},
    "glossary": {},
    "proposer_solver": {"n": 2},
    # Of the same shapes, in tests/v1, which has to be in PYTHONPATH: by --only.
    "kuhn_like": {},
    "glossary_like": {},
    "proposer_like": {},
}
OPTIONS = {
    "max_steps": 2,
    "batch_size": 8,
    "rollouts_per_example": 4,
    "max_seq_len": 3072,
    "max_tokens": 32,
    "temperature": 1.0,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
}


def play(name: str, folder: Path) -> tuple[bool, str]:
    """Run two steps. Returns whether they were done, and what to say of them."""
    model, run = folder / "model", folder / name
    if not model.exists():
        tokenizer = make_tokenizer(["<tool_call>", "</tool_call>", "<|tool|>"])
        tiny = make_model(tokenizer)
        tiny.config.max_position_embeddings = 4096
        tiny.save_pretrained(model)
        tokenizer.save_pretrained(model)
    run.mkdir(parents=True, exist_ok=True)
    server = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 64}
    server |= {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    config = {
        "model": str(model),
        "env": {"taskset": {"id": name}, **ENVIRONMENTS[name]},
        "inference": {"gpus": 0, "args": server},
        "trainer": {"gpus": 0, "args": OPTIONS | {"output_dir": str(run)}},
    }
    write_toml(config, run / "rl.toml")
    command = [sys.executable, "-m", "verifiers_rl.cli.rl", "@", str(run / "rl.toml")]
    with (run / "log.txt").open("wb") as log:
        try:
            done = subprocess.run(
                [*command, "--overwrite"],
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=900,
            )
        except subprocess.TimeoutExpired:  # the others are still to be played
            return False, f"no end within 900 s, see {run / 'log.txt'}"
    if done.returncode:
        return False, f"status {done.returncode}, see {run / 'log.txt'}"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = [row for row in map(json.loads, lines) if "reward" in row][-1]
    names = [key for key in row if key.endswith("/reward") or key == "reward"]
    names += ["error_share", "num_turns", "mismatch_kl"]
    return True, ", ".join(f"{key} {row[key]:.3g}" for key in names if row.get(key) is not None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    published = [name for name in ENVIRONMENTS if not name.endswith("_like")]
    parser.add_argument("--only", nargs="+", choices=list(ENVIRONMENTS), default=published)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "environments")
    options = parser.parse_args()
    print("| environment | what happened |\n| --- | --- |")
    all_played = True
    for name in options.only:
        played, said = True, f"not installed: uv pip install '{REPOSITORY}{name}'"
        if find_spec(name) is not None:
            played, said = play(name, options.folder.absolute())
        all_played &= played
        print(f"| {name} | {said} |", flush=True)
    return int(not all_played)


if __name__ == "__main__":
    sys.exit(main())
