"""How fast is the page of `vf-rl view`, and how much memory does its server take? An invented run.

    python benchmarks/view.py [--rollouts 100000] [--folder FOLDER]

The real command is started, and headless Chromium opens the page. Seconds of the page are from the
begin of its navigation. Bytes are those of the answers, as they were sent (compressed).
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
# All answers so far, the page's own included.
BYTES = """['navigation', 'resource'].flatMap(kind => performance.getEntriesByType(kind))
    .reduce((sum, entry) => sum + entry.transferSize, 0)"""


def memory_mb(pid: int) -> tuple[float, float]:
    """Return what a process holds now, and the most that it has held."""
    status = Path(f"/proc/{pid}/status").read_text()
    now, most = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "VmHWM"))
    return now / 1e3, most / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="of a run; default: an invented one")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    from tests.fake_run import write_fake_run

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = options.folder
        if folder is None:
            folder = Path(temporary) / "run"
            write_fake_run(folder, options.rollouts, options.steps)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"on disk: {size / 1e6:.0f} MB")
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        start = time.monotonic()
        command = [sys.executable, "-m", "verifiers_rl.cli.rl", "view", str(folder)]
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            address = server.stdout.readline().split()[-1]
            print(f"from the command to its address: {time.monotonic() - start:.2f} s")
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            now = "performance.now() / 1000"
            page.goto(address)
            page.locator("#chart-reward canvas").wait_for()
            drawn = page.evaluate(now)
            page.wait_for_timeout(1000)
            print(f"first contentful paint: {page.evaluate(PAINT):.2f} s, curves: {drawn:.2f} s, "
                  f"{page.evaluate(BYTES) / 1e3:.0f} kB")  # fmt: skip
            print("server after the overview: {:.0f} MB, at most {:.0f}".format(
                *memory_mb(server.pid)))  # fmt: skip

            def measure(what: str, address: str, selector: str) -> None:
                before, begin = page.evaluate(BYTES), time.monotonic()
                with page.expect_response(re.compile("/api/(rollout|group)")):
                    page.evaluate("address => { location.hash = address; }", address)
                page.locator(selector).first.wait_for()
                seconds = time.monotonic() - begin
                page.wait_for_timeout(300)
                sent = page.evaluate(BYTES) - before
                print(f"{what}: {seconds:.2f} s, {sent / 1e3:.0f} kB")

            measure("list of rollouts", "#/rollouts", ".rollouts a")
            measure("by reward", "#/rollouts?order=lowest&min_reward=0.5", ".rollouts a")
            measure("one rollout", "#/rollouts?number=5000", ".message")
            measure("its group", "#/rollouts?number=5000&tab=group", ".column")
            measure("search, found", "#/rollouts?text=mountain%20river", ".rollouts a")
            begin = time.monotonic()
            page.evaluate("location.hash = '#/rollouts?text=it+is+nowhere'")
            page.get_by_text(re.compile(r"^0 hits in ([\d,]+) of \1 ")).wait_for(timeout=120_000)
            print(f"search through all texts, nothing found: {time.monotonic() - begin:.2f} s")
            print("server at the end: {:.0f} MB, at most {:.0f}".format(*memory_mb(server.pid)))
        finally:
            server.terminate()
            server.wait(20)
            browser.close()


if __name__ == "__main__":
    main()
