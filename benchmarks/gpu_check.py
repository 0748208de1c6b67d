"""Run what needs a GPU, and print one table to paste into an issue.

    python benchmarks/gpu_check.py [--list] [--only WORDS] [--minutes 58] [--folder FOLDER]

`make gpu-check` installs the GPU build and runs this. Each check is a process with a deadline of
its own. After a failure the next check runs; at its end, whatever a check has started is ended.
What does not fit into `--minutes` is skipped. No network is needed: the models are made here.

The table goes to the terminal and to `report.md` in the folder; each check has a log beside it.
"""

import argparse
import ctypes
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
GRACE_S = 10.0  # between SIGTERM and SIGKILL
PACKAGES = (
    *("torch", "vllm", "transformers", "verifiers", "peft", "accelerate"),
    *("deepspeed", "flash-attn", "trl"),
)
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        command: what is run, in the repository's root.
        deadline_s: after so many seconds it is ended and has failed.
        num_gpus: fewer, and it is skipped.
        figure: a pattern; what its group matches in the output is the row's figure. The last match
            counts. A check without a match has failed.
        packages: modules that must be installed, or it is skipped.
        env: environment variables of its own.
        is_test: pytest is run, and all tests may be skipped.
    """

    name: str
    command: Sequence[str]
    deadline_s: float
    num_gpus: int = 1
    figure: str | None = r"^figure: (.*)"
    packages: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    is_test: bool = False


@dataclass(frozen=True)
class Row:
    name: str
    result: str  # pass, FAIL (why), skipped (why)
    seconds: float
    figure: str


def part(name: str, *arguments: str) -> list[str]:
    return [PYTHON, "benchmarks/gpu_parts.py", name, *arguments]


def all_checks(folder: Path) -> list[Check]:
    """Return the checks in their order: those that say most come first."""
    demo = part("demo", "--folder", str(folder / "demo"))
    full = [*demo, "--mode", "full"]
    shared = ["--one-gpu"]
    sync = [PYTHON, "benchmarks/weight_sync.py", "--repeats", "3", "--tokens", "64"]
    step = [PYTHON, "benchmarks/train_step.py", "--rounds", "1"]
    ours = [*step, "--only", "ours", "--samples", "53"]  # 16k tokens
    small, large = ["--shape", "qwen3-0.6b-whole"], ["--shape", "qwen3-4b", "--lora"]
    groups = ["--groups", "2", "--prompt", "512", "--reply", "256"]
    mfu = r"^model FLOPs utilisation of ours: (.*)"
    flex = [PYTHON, "-m", "pytest", "-q", "-rs", "-k", "sequence_in_a_pack and flex"]
    return [
        # As people have it: one GPU, LoRA, CUDA graphs, asynchronous scheduling.
        Check("demo: server and trainer on one GPU, adapter over HTTP, CUDA graphs",
              [*demo, *shared, "--graphs"], 300),
        Check("demo: the same, all weights; the server sleeps in each step",
              [*full, *shared, "--sleep"], 300),
        Check("three steps on the GPU against the CPU, float32", part("sharded", "cpu"), 120),
        # prime-rl's table, on an H100: 13.3k tokens/s; 11.9k and 11.1 %; 6.23k and 21.7 %.
        Check("train_step.py, Qwen3-0.6B, LoRA, 16k tokens: MFU", [*ours, *small, "--lora"],
              120, 1, mfu),
        Check("train_step.py, Qwen3-0.6B, all weights, 16k tokens: MFU", [*ours, *small],
              120, 1, mfu),
        Check("train_step.py, Qwen3-4B, LoRA, 16k tokens: MFU", [*ours, *large], 150, 1, mfu),
        Check("train_step.py, Qwen3-4B, LoRA, prompts shared by 16: MFU",
              [*ours, *large, *groups], 150, 1, mfu),
        Check("demo: a GPU each, adapter over NCCL", [*demo, "--backend", "nccl"], 200, 2),
        Check("demo: all weights over NCCL", [*full, "--backend", "nccl"], 150, 2),
        Check("demo: a server over 2 GPUs (TP 2), trainer on the CPU, all weights",
              [*full, "--server-gpus", "2", "--trainer-gpus", "0"], 200, 2),
        *gpu_tests(),
        Check("weight_sync.py over NCCL, Qwen3-0.6B", [*sync, "--nccl"], 240),
        Check("weight_sync.py over HTTP to a GPU, Qwen3-0.6B", sync, 150),
        *(
            Check(f"{kind} on 2 ranks against one", part("sharded", kind), 90,
                  packages=["deepspeed"] if kind.startswith("zero") else [])
            for kind in ("ddp", "fsdp2", "zero2", "zero3")
        ),
        Check("fsdp2 on 2 ranks against one, in bfloat16", part("sharded", "fsdp2", "--bf16"), 100),
        Check("mismatch.py: a server that quantises to fp8, trainer in bfloat16",
              [PYTHON, "benchmarks/mismatch.py", "--fp8"], 240),
        Check("flex attention keeps samples of a row apart",
              [*flex, "tests/test_logprobs.py"], 90, 1, None, is_test=True),
        # Last, because the textbook's step holds all logits.
        Check("train_step.py, small, all weights, compiled, against the textbook: MFU",
              [*step, "--compiled"], 120, 1, mfu),
    ]  # fmt: skip


def gpu_tests() -> list[Check]:
    """Return a check for each test that is marked `gpu`."""
    command = [PYTHON, "-m", "pytest", "-q", "-m", "gpu"]
    files = sorted(path for path in ROOT.glob("tests/**/*.py") if "mark.gpu" in path.read_text())
    collect = [*command, "--collect-only", *(str(path.relative_to(ROOT)) for path in files)]
    plain = {**os.environ, "PYTEST_ADDOPTS": ""}  # other options would change the list's form
    done = subprocess.run(collect, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=180)
    if done.returncode != 0:
        return [Check("tests marked gpu", collect, 180, 1, None)]
    names = [line for line in done.stdout.splitlines() if "::" in line]
    return [
        Check(name.partition("::")[2], [PYTHON, "-m", "pytest", "-q", "-rs", name], 90, 1, None,
              is_test=True)
        for name in names
    ]  # fmt: skip


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that `end_descendants` finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it ended meanwhile
        children.setdefault(parent, []).append(int(folder.name))
    found, ahead = [], [pid]
    while ahead:
        ahead.extend(ours := children.get(ahead.pop(), []))
        found.extend(ours)
    return found


def end_descendants(wait_s: float = 20.0) -> list[int]:
    """Send SIGKILL to all descendants of this process until none is left; return those that stay.
    Nothing else may use child processes of this process meanwhile.
    """
    deadline = time.monotonic() + wait_s
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass  # no child is left
        time.sleep(0.05)
    return left


def run_check(check: Check, log: Path, deadline_s: float) -> Row:
    """Run one check in a process of its own; end all that it has started."""
    start = time.monotonic()
    problem = ""
    with log.open("wb") as output:
        output.write(f"$ {shlex.join(check.command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            check.command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path(), **check.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(deadline_s)
            problem = f"status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {deadline_s:.0f} s"
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                pass  # it gets SIGKILL below
        finally:
            stay = end_descendants()
            process.poll()
    seconds = time.monotonic() - start
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    if stay:
        problem = f"processes {stay} could not be ended; {problem}"
    if problem:
        return Row(check.name, f"FAIL ({problem}: {last_words(lines)})", seconds, "")
    if check.is_test and not re.search(r"\d+ passed", lines[-1]):
        reasons = [line for line in lines if line.startswith("SKIPPED")]
        return Row(check.name, f"skipped ({last_words(reasons or lines)})", seconds, "")
    if check.figure is None:
        return Row(check.name, "pass", seconds, lines[-1] if check.is_test else "")
    found = re.findall(check.figure, text, re.MULTILINE)
    if not found:
        return Row(check.name, "FAIL (it printed no figure)", seconds, "")
    return Row(check.name, "pass", seconds, found[-1].strip())


def python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def last_words(lines: Sequence[str]) -> str:
    """Return the last line that says something, short enough for a table."""
    errors = [line for line in lines if re.match(r"(E  |\w*(Error|Exception)\b)", line)]
    words = " ".join((errors or lines or ["no output"])[-1].split())
    return words[:200]


def reason_to_skip(check: Check, num_gpus: int, left_s: float) -> str | None:
    if num_gpus < check.num_gpus:
        return f"needs {check.num_gpus} GPUs"
    if missing := [name for name in check.packages if find_spec(name) is None]:
        return f"not installed: {', '.join(missing)}"
    return "no time left" if left_s < 30 else None


def run_all(checks: Iterable[Check], num_gpus: int, folder: Path, minutes: float) -> list[Row]:
    """Run the checks one after the other; all together end within `minutes`."""
    adopt_orphans()
    end = time.monotonic() + 60 * minutes
    rows = []
    for number, check in enumerate(checks):
        left_s = end - time.monotonic()
        if (reason := reason_to_skip(check, num_gpus, left_s)) is not None:
            row = Row(check.name, f"skipped ({reason})", 0.0, "")
        else:
            slug = re.sub(r"\W+", "-", check.name)[:60]
            row = run_check(
                check, folder / f"{number:02d}-{slug}.log", min(check.deadline_s, left_s)
            )
        rows.append(row)
        print(f"{row.result.partition(' ')[0]:8}{row.seconds:6.0f} s  {row.name}", flush=True)
    return rows


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gpu_names() -> list[str]:
    """Return name, memory and driver of each GPU that CUDA_VISIBLE_DEVICES leaves visible."""
    query = "--query-gpu=name,memory.total,driver_version"
    lines = output_of("nvidia-smi", query, "--format=csv,noheader").splitlines()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return lines if visible is None else lines[: len([v for v in visible.split(",") if v.strip()])]


def environment(gpus: Sequence[str]) -> list[str]:
    """Return lines of Markdown about this machine."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    cuda = output_of(PYTHON, "-c", "import torch; print(torch.version.cuda)")
    nccl = output_of(PYTHON, "-c", "import torch; print(*torch.cuda.nccl.version(), sep='.')")
    return [
        *(f"- GPU {index}: {gpu}" for index, gpu in enumerate(gpus)),
        f"- CUDA {cuda or '?'}, NCCL {nccl or '?'}; {os.cpu_count()} CPU cores",
        f"- Python {platform.python_version()}, {', '.join(versions)}",
        f"- commit {output_of('git', 'rev-parse', '--short', 'HEAD') or '?'}",
    ]


def table(rows: Sequence[Row]) -> list[str]:
    def cell(text: str) -> str:
        return text.replace("|", "/")

    return [
        "| check | result | s | figure |",
        "| --- | --- | --- | --- |",
        *(
            f"| {cell(row.name)} | {cell(row.result)} | {row.seconds:.0f} | {cell(row.figure)} |"
            for row in rows
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="only print what would run")
    parser.add_argument("--only", help="run the checks whose name has these words")
    parser.add_argument("--minutes", type=float, default=58.0)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "gpu_check")
    options = parser.parse_args()
    folder = options.folder.absolute()
    checks = [c for c in all_checks(folder) if (options.only or "") in c.name]
    gpus = gpu_names()
    if options.list or not gpus:
        for check in checks:
            print(f"{check.deadline_s:5.0f} s  {check.num_gpus} GPU  {check.name}")
        if not options.list:
            sys.exit("gpu-check: no GPU here (nvidia-smi names none); the above was not run")
        return
    folder.mkdir(parents=True, exist_ok=True)
    rows = run_all(checks, len(gpus), folder, options.minutes)
    report = "\n".join([*environment(gpus), "", *table(rows)])
    (folder / "report.md").write_text(report + "\n")
    print(f"\n{report}\n\n{folder / 'report.md'}; the logs are beside it")
    failed = sum(row.result.startswith("FAIL") for row in rows)
    if failed:
        sys.exit(f"gpu-check: {failed} of {len(rows)} checks failed")


if __name__ == "__main__":
    main()
