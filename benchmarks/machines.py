"""Does a run on several machines learn, and outlive a machine whose link is cut?

    python benchmarks/machines.py                      # four variables on two machines
    python benchmarks/machines.py --trainers 2         # ranks on both
    python benchmarks/machines.py --ray --cut          # Ray places a server again
    python benchmarks/machines.py --ray --interrupt    # all processes of the run end
    python benchmarks/machines.py --ray --cut --steps 900 --until-back   # until it serves again

Two machines (three with --ray, of which one is the head of a cluster that runs already) are network
namespaces of this one, with addresses of their own; it takes root. Real servers and a real trainer,
on CPUs, with the model of the demo. With --cut, the link of a machine with a server and without the
trainer is cut after three steps. What is printed: the exit statuses, the servers in each
step, the slowest step, the largest `mismatch_kl`, the share of rollouts that began again in another
rollout worker, and what is left running afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
VF_RL = [sys.executable, "-m", "verifiers_rl.cli.rl", "@"]
DEADLINE_S = 500.0


def write_run(folder: Path, options: argparse.Namespace) -> Path:
    """Make the model, unless it is there, and the TOML of the run."""
    example = ROOT / "examples" / "reverse_text"
    model = options.model or folder / "model"
    if not model.exists():
        script = ROOT / "examples" / "warm_start.py"
        command = [sys.executable, str(script), str(example / "reverse_text.py"), str(model)]
        subprocess.run(command, cwd=ROOT, check=True)
    shutil.copy(example / "reverse_text.py", folder)
    text = (example / "rl.toml").read_text()
    text = text.replace('"./outputs/warm_start"', json.dumps(str(model)))
    ours = {"max_steps": options.steps, "batch_size": 32, "logging_steps": 1, "eval_steps": 1000}
    ours |= {"output_dir": f'"{folder}/run"', "eval_on_start": "false", "save_steps": 1}
    ours |= {"save_strategy": '"steps"', "env_workers": 1}
    for name in ours:
        text = re.sub(rf"^{name} = .*\n", "", text, flags=re.MULTILINE)
    text += "".join(f"{name} = {value}\n" for name, value in ours.items())
    address = '\naddress = "10.77.0.1:6379"' if options.ray else ""
    text += f"\n[cluster]{address}\ntrainer_nodes = {options.trainers}\n"
    text += f"inference_nodes = {options.servers}\n"
    (folder / "rl.toml").write_text(text)
    return folder / "rl.toml"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "mismatch_kl" in row]


def are_back(folder: Path) -> bool:
    """Whether a server was lost, and the last three steps had all servers."""
    found = [int(row["num_servers"]) for row in rows_of(folder) if row.get("num_servers")]
    return len(set(found)) > 1 and min(found[-3:]) == max(found)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done() and time.monotonic() < deadline:
        time.sleep(0.2)


def left_running(names: list[str]) -> list[str]:
    """What of a run, not of Ray itself, still runs on these machines."""
    found = []
    for name in names:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        for pid in pids.stdout.split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except FileNotFoundError:
                continue  # it has just ended
            if "verifiers_rl" in words:
                found.append(f"{name}: {words[:90]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--machines", type=int, help="default: 2, or 3 with Ray")
    parser.add_argument("--trainers", type=int, help="machines with ranks")
    parser.add_argument("--servers", type=int, default=2, help="machines with a server")
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--cut", action="store_true", help="cut a link after 3 steps")
    parser.add_argument("--interrupt", action="store_true", help="Ctrl-C after 3 steps")
    parser.add_argument(
        "--until-back", action="store_true", help="Ctrl-C three steps after a lost server is back"
    )
    parser.add_argument("--model", type=Path, help="a warm start that exists already")
    options = parser.parse_args()
    options.trainers = options.trainers or 1
    options.machines = options.machines or (3 if options.ray else 2)

    from tests.machines import machines
    from tests.test_ray_engine import ray_cluster

    folder = Path(tempfile.mkdtemp(prefix="machines-"))
    toml = write_run(folder, options)
    os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1")
    with ExitStack() as stack:
        found = stack.enter_context(machines(options.machines))
        environment = stack.enter_context(ray_cluster(found)) if options.ray else os.environ
        processes, starts, apart = [], [{}], []
        if not options.ray:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="vfray", dir="/tmp"))
            # Machines have files of Ray's of their own.
            apart = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', own]
            common = {"RAY_TMPDIR": own, "MASTER_ADDR": found[0].address, "MASTER_PORT": "29500"}
            common |= {"WORLD_SIZE": str(len(found)), "VERIFIERS_RL_TOKEN": "of this run"}
            starts = [{**common, "RANK": str(rank)} for rank in range(len(found))]
        for rank, variables in enumerate(starts):
            output = stack.enter_context((folder / f"log{rank}").open("wb"))
            process = subprocess.Popen(
                [*found[rank].words, *(apart if rank else []), *VF_RL, str(toml)], cwd=ROOT,
                env={**environment, **variables}, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            processes.append(process)
        if options.cut or options.interrupt:
            wait_until(lambda: len(rows_of(folder)) >= 3 or processes[0].poll() is not None)
        if options.cut:
            said = (folder / "log0").read_text(errors="replace")
            places = dict(re.findall(r"vf-rl: (\S+) is on ([\d.]+)", said))
            taken = {address for name, address in places.items() if name.startswith("trainer")}
            found_free = (one for one in found if one.address not in {*taken, found[0].address})
            next(found_free).set_link("down")
        began = time.monotonic()
        if options.until_back:
            wait_until(lambda: are_back(folder) or processes[0].poll() is not None)
            print(f"{time.monotonic() - began:.0f} s until all servers are back, for three steps")
        if options.interrupt or options.until_back:
            processes[0].send_signal(signal.SIGINT)
        began = time.monotonic()
        wait_until(lambda: all(process.poll() is not None for process in processes))
        print(f"ended {time.monotonic() - began:.0f} s later with {[p.poll() for p in processes]}")
        time.sleep(2.0)  # actors that were killed take their children with them
        print("left running:", left_running([one.name for one in found]) or "nothing")
    rows = rows_of(folder)
    print("servers:", [int(row["num_servers"]) for row in rows if row.get("num_servers")])
    print("began again:", max((row.get("restarted_share", 0.0) for row in rows), default=0.0))
    print("slowest step:", max((row["step_s"] for row in rows), default=0.0))
    print("largest mismatch_kl:", max((row["mismatch_kl"] for row in rows), default=0.0))
    for rank in range(len(processes)):
        for line in (folder / f"log{rank}").read_text(errors="replace").splitlines():
            if ("vf-rl:" in line and ("lost" in line or "again" in line)) or (
                "rollout worker" in line or "begin again" in line
            ):
                print(f"  machine {rank}: {line[:160]}")
    print("logs:", folder)


if __name__ == "__main__":
    main()
