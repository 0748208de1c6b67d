"""Promises of the project as a whole."""

import re
import subprocess
import sys
import time

import verifiers_rl
from tests.helpers import ROOT

PACKAGE = ROOT / "verifiers_rl"


def test_the_core_reads_in_an_evening():
    lines = {
        name: len((PACKAGE / name).read_text().splitlines())
        for name in ("trainer.py", "orchestrator.py")
    }
    assert sum(lines.values()) < 1000, lines


def test_import_is_fast():
    # Not a benchmark: torch alone takes seconds, so a heavy import at the top is told from none.
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import verifiers_rl"], check=True)
    elapsed = time.monotonic() - start
    heavy = (
        "import sys, verifiers_rl; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'vllm')))"
    )
    subprocess.run([sys.executable, "-c", heavy], check=True)
    assert elapsed < 2.0


def test_all_public_names_exist():
    for name in verifiers_rl.__all__:
        assert getattr(verifiers_rl, name) is not None
    assert set(verifiers_rl.__all__) <= set(dir(verifiers_rl))


def test_parts_import_only_what_they_may():
    def imported(path):
        return set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))

    classic = ("environments_classic.py", "clients.py")
    v1 = ("environments_v1.py", "chat_harness.py", "dataset_env.py")
    v1 += ("v1_loading.py", "v1_tasks.py", "v1_versions.py")
    for path in PACKAGE.rglob("*.py"):
        names = imported(path)
        if path.parent.name != "inference":
            assert "vllm" not in names, path
        if path.name not in (*classic, *v1):
            assert "verifiers" not in names, path
        if path.name not in classic:  # which the current verifiers does not have
            assert not re.search(r"(from|import) verifiers\.legacy", path.read_text()), path
    for name in ("advantages.py", "losses.py", "logprobs.py", "packing.py", "rollouts.py"):
        assert imported(PACKAGE / name) <= {
            "torch", "verifiers_rl", "__future__", "collections", "contextlib", "dataclasses",
            "functools", "inspect", "math", "typing", "numpy",
        }, name  # fmt: skip


def test_every_logged_metric_is_documented():
    from verifiers_rl.report.means import batch_metrics
    from verifiers_rl.types import Rollout

    documented = set(
        re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    )
    trainer = (PACKAGE / "trainer.py").read_text()
    step_metrics = re.search(r"        metrics = \{\n(.*?)\n        \}", trainer, re.DOTALL)
    names = set(re.findall(r'"(\w+)":', step_metrics.group(1)))
    names |= set(batch_metrics([[Rollout(0, "", reward=1.0)]]))
    names |= {
        "entropy",
        "importance_ratio",
        "importance_ratio_max",
        "mismatch_kl",
        "advantage_abs",
        "clipped_share",
    }
    names |= {
        "sync_s",
        "sync_bytes",
        "step_s",
        "generation_s",
        "num_samples",
        "filtered_share",
        "reference_kl",
        "masked_share",
        "clamped_share",
        "tokens_per_s",
        "peak_memory_gb",
        "mfu",
        "loss",
        "grad_norm",
        "learning_rate",
    }
    assert names <= documented, names - documented
