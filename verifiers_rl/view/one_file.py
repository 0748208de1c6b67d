"""The page about runs as one file, which needs no server and no network.

    state and curves of each run    all lines up to `MAX_ROWS`, else means over neighbours
    rollouts                        whole groups from all over the run, as many as there is room for

The data are compressed and in base64, so nothing that a model wrote is part of the HTML.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
import re
import time
import zlib
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import numpy as np

import verifiers_rl
from verifiers_rl.json_text import as_json
from verifiers_rl.report.run_folder import replace_file
from verifiers_rl.view.browse import (
    complete,
    cut_texts,
    preview_of,
    rewards_over_steps,
    tokens_of,
)
from verifiers_rl.view.files import HAS_ERROR, HAS_TOKENS, IS_EVAL, Rollouts
from verifiers_rl.view.runs import Run, Runs, ViewError

STATIC = Path(__file__).parent / "static"
MAX_ROWS = 1_000  # lines of metrics of a run; of more, neighbours become one
MAX_TEXT = 20_000  # characters of one text of a rollout
_FAILED, _EVALUATED = 8, 12  # groups with a failed rollout; of the first and the last evaluation
_TOKENS_SHARE = 0.4  # of the room for rollouts
_TRIES = 4
_PATIENCE = 50  # groups in a row that are too large for the rest of the room


def write_page(runs: Runs, target: Path, max_bytes: int) -> list[str]:
    """Write the page. Returns lines that say what it holds.

    Args:
        runs: all of them are on the page.
        target: the file; an old one is replaced.
        max_bytes: its size.

    Raises:
        ViewError: the page has no run, or is too large without any rollout.
        OSError: the file cannot be written.
    """
    found = [run for run in runs.find() if run.state()["status"] != "empty"]
    if not found:
        raise ViewError("there is no run in these folders; a run has metrics.jsonl or run.json")
    room, page, parts = float(max_bytes), b"", []
    codes = [run.code() for run in found]
    different = {n for code in codes for n in code if len({one.get(n) for one in codes}) > 1}
    about = {"made_at": time.time(), "version": verifiers_rl.__version__}
    for _ in range(_TRIES):
        more = [_describe(run, room / len(found), different) for run in found]
        larger = make_page({**about, "runs": more})
        spare = max_bytes - len(larger)
        if spare >= 0:
            page, parts = larger, more
            if _is_whole(more) or spare < 0.15 * max_bytes:
                break
        elif page or room == 0.0:
            break
        # Compressed together, rollouts take less than alone.
        room = max(room + (spare if spare > 0 else 1.1 * spare), 0.0)
    if not page:
        raise ViewError(
            f"the page has {len(larger) / 1e6:.2f} MB without rollouts; raise --max-mb above it, "
            "or show fewer runs"
        )
    replace_file(target, page, "choose another -o")
    lines = [f"{target}: {len(page) / 1e6:.2f} MB"]
    for part in parts:
        lines.append(
            f"{part['state']['name']}: {len(part['rollouts']):,} of "
            f"{part['state']['num_rollouts']:,} rollouts, tokens of {len(part['tokens']):,}"
        )
    return lines


def _is_whole(parts: list[dict[str, Any]]) -> bool:
    return all(len(part["rollouts"]) == part["state"]["num_rollouts"] for part in parts)


def _describe(run: Run, room: float, different: Set[str]) -> dict[str, Any]:
    """Return what the page has of a run: see `static/source.js`. Of its code only what is different
    in another run.
    """
    part: dict[str, Any] = {
        "state": run.state(),
        "metrics": thinned(run.metrics()),
        "code": {name: text for name, text in run.code().items() if name in different},
        "rewards": None,
        "rollouts": [],
        "tokens": {},
        "envs": [],
    }

    def add(rollouts: Rollouts) -> None:
        part["rewards"], part["envs"] = rewards_over_steps(rollouts), rollouts.envs
        part["state"]["num_rollouts"] = len(rollouts)
        # What is compressed alone, and in base64, takes more than its share of the whole.
        own = len(zlib.compress(as_json(part))) * 4 / 3 + 60_000
        part["rollouts"], part["tokens"] = choose_rollouts(rollouts, (room - own) * 3 / 4)

    run.ask(add)
    return part


def thinned(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics with at most `MAX_ROWS` lines: means over neighbours, which are marked by
    `rows_of_one`, how many they are. Names that end in `_max` have the maximum.
    """
    columns = metrics["columns"]
    num_rows = max(map(len, columns.values()), default=0)
    size = max(-(-num_rows // MAX_ROWS), 1)
    if size > 1:
        columns = {
            name: [_one(name, values[i : i + size]) for i in range(0, num_rows, size)]
            for name, values in columns.items()
        }
    return {**metrics, "columns": columns, "rows_of_one": size}


def _one(name: str, values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if name == "step" or name.endswith("_max"):
        return max(known)
    return float(f"{math.fsum(known) / len(known):.7g}")


# --- Which rollouts -------------------------------------------------------------------------------


def choose_rollouts(rollouts: Rollouts, room: float) -> tuple[list[Any], dict[int, Any]]:
    """Return rollouts, by their number, and the tokens of some of them.

    Args:
        room: bytes that they may take, compressed.
    """
    rows: dict[int, Any] = {}
    tokens: dict[int, Any] = {}
    for_tokens = _TOKENS_SHARE * room
    patience = _PATIENCE
    for numbers in _groups_in_order(rollouts):
        if not patience:
            break
        group = {
            number: {
                **cut_texts(complete(row), MAX_TEXT),
                "number": number,
                "preview": preview_of(row),
                "has_tokens": False,
            }
            for number, row in zip(numbers, rollouts.rows(numbers), strict=True)
        }
        size = len(zlib.compress(as_json(list(group.values()))))
        if size > room:
            patience -= 1
            continue
        patience, room = _PATIENCE, room - size
        rows |= group
        for number, row in group.items():
            if for_tokens <= 0 or (found := tokens_of(rollouts, number)) is None:
                continue
            size = len(zlib.compress(as_json(found)))
            if size <= min(for_tokens, room):
                for_tokens, room = for_tokens - size, room - size
                tokens[number], row["has_tokens"] = found, True
    return [rows[number] for number in sorted(rows)], tokens


def _groups_in_order(rollouts: Rollouts) -> Iterable[list[int]]:
    """Return the rollouts of each group, the most telling groups first: one of each step, with
    tokens if one has them, steps from all over the run before those between them; groups with
    failed rollouts; groups of the last and the first evaluation; then the other groups.
    """
    index = rollouts.index
    is_eval = (index["flags"] & IS_EVAL).astype(np.int64)
    keys = (index["step"].astype(np.int64) << 33) | (is_eval << 32) | index["group"]
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    groups = [group.tolist() for group in np.split(order, starts[1:])] if len(order) else []

    def is_any(group: list[int], flag: int) -> bool:
        return bool((index["flags"][group] & flag).any())

    of_step: dict[tuple[int, int], list[list[int]]] = {}
    for group in groups:
        first = group[0]
        of_step.setdefault((int(is_eval[first]), int(index["step"][first])), []).append(group)
    trained = {step: of_step[0, step] for split, step in of_step if split == 0}
    for step in trained:
        trained[step].sort(key=lambda group: not is_any(group, HAS_TOKENS))
    steps = spread(sorted(trained))
    failed = [group for group in groups if is_any(group, HAS_ERROR)]
    evaluations = sorted(step for split, step in of_step if split == 1)
    telling = [trained[step][0] for step in steps]
    telling += spread(failed)[:_FAILED]
    for step in (*evaluations[-1:], *evaluations[:1]):
        telling += of_step[1, step][:_EVALUATED]
    for place in range(1, max(map(len, trained.values()), default=0)):
        telling += (trained[step][place] for step in steps if place < len(trained[step]))
    return {group[0]: group for group in [*telling, *groups]}.values()


def spread(items: list[Any]) -> list[Any]:
    """Return the last item, the first one, the one in the middle, those in the middle of the
    halves, and so on: the first n are from all over the list.
    """
    last, parts = len(items) - 1, 1
    places = dict.fromkeys(range(len(items))[last:])
    while len(places) < len(items):
        places |= dict.fromkeys(last * part // parts for part in range(parts))
        parts *= 2
    return [items[place] for place in places]


# --- The file -------------------------------------------------------------------------------------


def make_page(data: dict[str, Any]) -> bytes:
    """Return the HTML of the page with its styles, scripts and data inside."""
    scripts: list[str] = []
    styles: list[str] = []
    licence = _own("vendor/LICENSE")

    def inline_style(match: re.Match[str]) -> str:
        styles.append(_own(match[1]))
        return f"<style>{styles[-1]}</style>"

    def inline_script(match: re.Match[str]) -> str:
        is_module = 'type="module"' in match[0]
        text = bundle(match[1]) if is_module else f"/*\n{licence}*/\n{_own(match[1])}"
        scripts.append(text)
        opening = '<script type="module">' if is_module else "<script>"
        return f"{opening}{scripts[-1]}</script>"

    page = _own("index.html")
    icon = base64.b64encode(_own("icon.svg").encode()).decode()
    page = page.replace("/static/icon.svg", f"data:image/svg+xml;base64,{icon}")
    page = re.sub(r'<link rel="stylesheet" href="/static/([^"]+)">', inline_style, page)
    page = re.sub(r'<script [^>]*src="/static/([^"]+)"[^>]*></script>', inline_script, page)
    hashes = {
        kind: " ".join(f"'sha256-{_digest(text)}'" for text in texts)
        for kind, texts in (("script", scripts), ("style", styles))
    }
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    packed = base64.b64encode(gzip.compress(as_json(data), mtime=0)).decode()
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        1,
    )
    holder = f'<script type="text/plain" id="data">{packed}</script>'
    return page.replace("<!-- data -->", holder, 1).encode()


def bundle(name: str) -> str:
    """Return a module of the page and all that it imports as one: those that others need come
    first. No two of them have a name in common.
    """
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        text = _own(name)
        texts[name] = ""  # its place is taken, so that a circle ends
        needs = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
        for needed in needs.findall(text):
            if needed not in texts:
                add(needed)
        text = needs.sub("", text)
        del texts[name]
        texts[name] = re.sub(
            r"^export (?=(async )?function|const|class)", "", text, flags=re.MULTILINE
        )

    add(name)
    return "".join(texts.values())


def _own(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
