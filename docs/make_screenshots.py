"""Make the pictures of docs/watching.md, in docs/images.

    python docs/make_screenshots.py RUN OTHER

RUN is the folder of a run of the demo with `logging_steps = 1` and `log_rollouts = 0.1`, OTHER one
with other options. Needs Chromium and playwright. Look at the pictures before they are committed.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TARGET = Path(__file__).parent / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def main() -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    command = [sys.executable, "-m", "verifiers_rl.cli.rl", "view"]
    TARGET.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)

        def take(
            name: str, runs: list[str], part: str, wait_for: str, width: int = 1180,
            height: int = 860, prepare: Callable[[Any], None] | None = None, scheme: str = "light",
        ) -> None:  # fmt: skip
            server = subprocess.Popen(
                [*command, *runs], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            try:
                address = server.stdout.readline().split()[-1]
                size = {"width": width, "height": height}
                page = browser.new_page(viewport=size, color_scheme=scheme)
                page.goto(address + part)
                page.locator(wait_for).first.wait_for()
                page.wait_for_timeout(1500)
                if prepare is not None:
                    prepare(page)
                    page.wait_for_timeout(500)
                page.screenshot(path=TARGET / f"{name}.png")
                page.close()
            finally:
                server.terminate()
                server.wait(20)

        def show_tokens(page: Any) -> None:
            page.locator(".rollouts a").nth(5).click()
            page.locator(".message").first.wait_for()
            page.keyboard.press("t")
            page.locator("input[value=entropy]").check()
            page.locator(".token[data-i]").nth(12).hover()

        def show_group(page: Any) -> None:
            page.locator(".rollouts a").nth(5).click()
            page.locator(".message").first.wait_for()
            page.keyboard.press("g")

        one, both = sys.argv[1:2], sys.argv[1:3]
        curve = "#chart-reward canvas"
        take("overview", one, "", curve)
        take("compare", both, "", curve)
        take("time", one, "#/time", ".bar", height=660)
        early = "#/rollouts?kind=with_tokens&to_step=10"
        take("tokens", one, early, ".rollouts a", height=760, prepare=show_tokens)
        take("group", one, early, ".rollouts a", prepare=show_group, scheme="dark")
        take("phone", both, "", curve.replace("canvas", ".now"), 390, 844)
        browser.close()
    for path in sorted(TARGET.glob("*.png")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    if len(sys.argv) != 3 or re.match("-", sys.argv[1]):
        sys.exit(__doc__)
    main()
