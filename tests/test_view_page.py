"""The page about runs in headless Chromium."""

import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import sync_playwright

from tests import test_replay
from tests.fake_run import write_fake_run
from tests.test_rollouts import make_row, read, write_rows
from tests.test_view import HOSTILE, serving, write_lines
from verifiers_rl.replay import replay
from verifiers_rl.report.run_folder import read_run, remove_rollouts, write_run
from verifiers_rl.view import browse, one_file
from verifiers_rl.view.runs import Runs

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None:
    pytest.skip("needs Chromium, a package of the system", allow_module_level=True)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
PARTS = ("#/overview", "#/time", "#/rollouts", "#/options")
TABS = ("messages", "group", "tokens")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens an address in a window of its own. At the end: no error in any console."""
    contexts, errors = [], []

    def open_page(address, viewport=WIDE, **options):
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        context.set_default_timeout(15_000)
        page = context.new_page()
        page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else 0)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("response", lambda r: errors.append(r.url) if r.status >= 400 else 0)
        page.goto(address)
        return page

    open_page.errors = errors
    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_fake_run(folder / "first", 700, 21, seed=0)
    write_fake_run(folder / "second", 500, 30, seed=1)
    return folder


@pytest.fixture(scope="module")
def address(two_runs):
    with serving(two_runs) as client:
        yield f"{client.base_url}/?token=secret-token"


def see(page, selector):
    page.locator(selector).first.wait_for()


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


def text(page, selector):
    return page.locator(selector).first.inner_text()


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def go(page, part, selector="main *"):
    page.evaluate("part => { location.hash = part; }", part)
    see(page, selector)


def until(page, condition):
    """Wait for a condition. The page's own policy keeps Playwright's way of waiting out of it."""
    deadline = time.monotonic() + 15
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def visit(page, *parts):
    """Go to these parts, of which none scrolls sideways."""
    for part in parts:
        go(page, part)
        page.wait_for_timeout(60)
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), part


# --- Curves ---------------------------------------------------------------------------------------


def test_the_overview_shows_how_two_runs_are_and_leads_to_the_rollouts_of_a_step(
    open_page, address
):
    page = open_page(address)
    see(page, "#chart-reward canvas")
    assert "token" not in page.url and page.title() == "2 runs · Overview"
    first = text(page, ".card")
    assert "step 21 of 21" in first and "finished" in first and "first" in first
    assert "error_share" in first  # one rollout in a hundred has failed
    rows = texts(page, "section[aria-label='Different options'] tbody tr")
    assert [row.split()[0] for row in rows] == ["max_steps", "batch_size", "learning_rate"]
    assert "0.00001" in rows[2] and "0.00002" in rows[2]
    page.locator("#chart-reward .plot").focus()
    press(page, *["ArrowRight"] * 3)
    legend = text(page, "#chart-reward .now")
    assert "first" in legend and "second" in legend and legend.endswith("step 3")
    press(page, "Enter")
    assert "Step 3" in text(page, ".pinned")
    page.locator(".pinned a").first.click()
    see(page, ".rollouts a")
    assert "from_step=3&to_step=3" in page.url
    assert all("step 3" in about for about in texts(page, ".about"))
    go(page, "#/time", ".bar")
    shares = page.locator(".shares").first.locator("td:nth-child(2)").all_inner_texts()
    assert 97 <= sum(int(share.split()[0]) for share in shares) <= 103
    # A run can be left out, and the address keeps that.
    press(page, "1")
    page.get_by_role("checkbox", name="second").uncheck()
    until(page, "document.querySelectorAll('.card').length === 1")
    page.reload()
    see(page, "#chart-reward canvas")
    assert "runs=first" in page.url and page.locator(".card").count() == 1


LOSS = """\
from verifiers_rl.losses import reinforce

api_key = "0123-the-key"


def mine(inputs):
    inputs.weights = inputs.weights * 1.0
    return reinforce(inputs)
"""


def test_two_runs_that_differ_by_one_line_of_a_loss_are_told_apart(
    open_page, make_trainer, monkeypatch, tmp_path
):
    code, runs = tmp_path / "code", tmp_path / "runs"
    code.mkdir()
    monkeypatch.syspath_prepend(code)
    for name, line in (("first", "* 1.0"), ("second", "* 2.0")):
        (code / "my_loss.py").write_text(LOSS.replace("* 1.0", line))
        monkeypatch.delitem(sys.modules, "my_loss", raising=False)
        shutil.rmtree(code / "__pycache__", ignore_errors=True)
        options = {"loss": "my_loss:mine", "run_name": name, "max_steps": 1}
        make_trainer(output_dir=str(runs / name), **options).train()
    one_file.write_page(Runs([runs]), tmp_path / "page.html", 2_000_000)
    with serving(runs) as client:
        for address in (f"{client.base_url}/?token=secret-token", f"file://{tmp_path}/page.html"):
            page = open_page(address)
            see(page, ".diff pre")
            rows = texts(page, "section[aria-label='Different options'] tbody tr")
            assert [row.split("\t")[0] for row in rows] == ["code of my_loss"]
            assert text(page, ".diff summary") == "my_loss: first → second"
            assert texts(page, ".diff-old") == ["-     inputs.weights = inputs.weights * 1.0"]
            assert texts(page, ".diff-new") == ["+     inputs.weights = inputs.weights * 2.0"]
            go(page, "#/options", ".diff pre")
            page.close()
    digest, kept = read_run(runs / "second")["code"]["my_loss"]
    assert digest == hashlib.sha256((code / "my_loss.py").read_bytes()).hexdigest()
    assert kept == (code / "my_loss.py").read_text().replace("0123-the-key", "***")


def test_no_part_scrolls_sideways_on_a_phone(open_page, address):
    page = open_page(address, PHONE, color_scheme="dark")
    see(page, ".card")
    visit(page, *PARTS, *(f"#/rollouts?run=first&number=3&tab={tab}" for tab in TABS))


# --- Rollouts -------------------------------------------------------------------------------------


def test_rollouts_are_filtered_and_the_address_keeps_the_filter(open_page, address, two_runs):
    page = open_page(address + "#/rollouts?run=first")
    see(page, ".rollouts a")
    rollouts = read(two_runs / "first")
    assert page.locator(".rollouts li").count() == 50
    assert text(page, ".count") == f"{len(rollouts)} rollouts"
    page.get_by_role("button", name="More (").click()
    until(page, "document.querySelectorAll('.rollouts li').length === 100")
    page.locator("#filter-kind").select_option("failed")
    until(page, "document.querySelectorAll('.flag-failed').length > 0")
    num_failed = sum(row["error"] is not None for row in rollouts)
    assert page.locator(".rollouts li").count() == num_failed > 0
    page.reload()
    see(page, ".flag-failed")
    assert page.locator("#filter-kind").input_value() == "failed"
    page.get_by_role("button", name="Clear").click()
    press(page, "/")
    page.keyboard.type("calculate")
    until(page, "document.querySelector('.count').textContent.includes('hits')")
    page.locator(".rollouts a").first.click()
    assert text(page, ".message mark").lower() == "calculate"
    page.locator("#filter-run").select_option("second")
    until(page, "location.hash.includes('run=second')")


def test_keys_go_through_the_list_the_tabs_and_the_group(open_page, address):
    page = open_page(address + "#/rollouts?run=first&kind=with_tokens&order=oldest")
    see(page, ".rollouts a")
    number = "Number(new URLSearchParams(location.hash.split('?')[1]).get('number'))"
    seen = []
    for key in "jjk":
        press(page, key)
        see(page, ".message")
        seen.append(page.evaluate(number))
    assert seen[0] == seen[2] != seen[1]
    press(page, "g")
    see(page, ".column")
    assert page.locator(".column").count() == 8
    rewards = [float(said) for said in texts(page, ".column .reward") if said != "no reward"]
    assert rewards == sorted(rewards, reverse=True)
    press(page, "]")
    until(page, f"{number} === {seen[0] + 1}")
    press(page, "t")
    see(page, ".token")
    page.locator(".tokens").focus()
    press(page, "End")
    assert "ratio" in text(page, ".readout")
    press(page, "Escape")
    see(page, ".nothing")


def test_tokens_are_colored_by_each_of_their_numbers(open_page, address, two_runs):
    rollouts = read(two_runs / "first")
    number = next(row for row in range(len(rollouts)) if rollouts[row]["has_tokens"])
    row = rollouts[number]
    page = open_page(f"{address}#/rollouts?run=first&number={number}&tab=tokens")
    tokens = page.locator(".token[data-i]")
    tokens.first.wait_for()
    assert tokens.count() == len(row["token_ids"])
    assert "".join(tokens.all_inner_texts()).split() == "".join(row["token_texts"]).split()
    looks = set()
    look = "[...document.querySelectorAll('.token[data-i]')].map(t => t.outerHTML).join()"
    for name in ("logprob", "trainer_logprob", "ratio", "entropy", "advantage", "version", "mask"):
        page.locator(f"input[value={name}]").check()
        looks.add(page.evaluate(look))
        assert text(page, ".legend") != ""
    assert len(looks) == 7
    assert page.locator(".tokens .token-masked").count() == sum(row["is_masked"])
    place = row["loss_mask"].index(True)
    tokens.nth(place).hover()
    readout = text(page, ".readout")
    assert f"id {row['token_ids'][place]}" in readout and "in the loss" in readout


def test_tokens_are_colored_by_their_weight_under_each_loss(open_page, tmp_path):
    folder, _ = test_replay.train(tmp_path, max_steps=1)
    losses = ["reinforce", *test_replay.named(test_replay.of_good)]
    replay(folder, 1, losses)
    rows = read(folder)
    number = next(i for i, row in enumerate(rows) if row["group"] and row["advantage"] < 0)
    with serving(folder) as client:
        part = f"?token=secret-token#/rollouts?number={number}&tab=tokens"
        page = open_page(f"{client.base_url}/{part}", color_scheme="dark")
        token = page.locator(".token[data-i]").nth(rows[number]["loss_mask"].index(True))
        for loss, color in zip(losses, ("rgb(124, 192, 255)", "rgb(22, 25, 29)"), strict=True):
            page.get_by_role("radio", name=loss, exact=True).check()
            assert text(page, ".legend b") == f"Gradient weight under {loss}"
            assert token.evaluate("token => token.style.background") == color
        token.hover()
        weights = f"weight reinforce {rows[number]['advantage']:.4g} weight {losses[1]} 0"
        assert weights in text(page, ".readout")
        # Another run has the folder.
        written = folder / "replay/step-000001.parquet"
        table = pq.read_table(written)
        pq.write_table(table.set_column(2, "trainer_logprob", table["rollout"]), written)
        page.reload()
        token.wait_for()
        assert page.locator(".choice").count() == 1


def test_a_rollout_has_its_timeline_its_calls_and_its_reasoning(open_page, address, two_runs):
    rollouts = read(two_runs / "first")
    number = next(
        i for i, row in enumerate(rollouts)
        if row["num_turns"] == 2 and row["messages"][2]["reasoning_content"] and not row["error"]
    )  # fmt: skip
    page = open_page(f"{address}#/rollouts?run=first&number={number}")
    see(page, ".message")
    assert texts(page, ".span-title") == ["turn 1", "calculate", "turn 2"]
    assert "in tools" in text(page, ".timeline summary")
    reasoning = rollouts[number]["messages"][2]["reasoning_content"]
    assert text(page, ".reasoning .text") == reasoning
    assert "expression" in text(page, ".call .text")


# --- Runs that change, odd runs, hostile runs -----------------------------------------------------


@pytest.mark.slow
def test_the_page_follows_a_run_that_goes_on_and_one_that_is_resumed(open_page, tmp_path):
    def train(*steps):
        for step in steps:
            write_rows(tmp_path, make_row(step, content=f"of step {step}"), first=step)
            write_lines(tmp_path / "metrics.jsonl", {"step": step, "reward": step / 10})

    run = {"status": "running", "pid": os.getpid(), "max_steps": 20, "begun_at": time.time()}
    with serving(tmp_path) as client:
        page = open_page(f"{client.base_url}/?token=secret-token")
        see(page, ".card .is-empty")
        write_run(tmp_path, run)
        train(1, 2, 3)
        page.get_by_text("step 3 of 20").wait_for()
        see(page, "#chart-reward canvas")
        press(page, "3")
        page.get_by_text("of step 3").wait_for()
        train(4, 5, 6)
        page.get_by_role("button", name="3 new rollouts: show").click()
        page.get_by_text("of step 6").wait_for()
        # It is resumed from step 2: the rows after it are removed on both sides.
        write_lines(tmp_path / "aside", *({"step": n, "reward": 0.0} for n in (1, 2)))
        (tmp_path / "aside").replace(tmp_path / "metrics.jsonl")
        remove_rollouts(tmp_path, behind=2)
        train(3)
        page.get_by_role("button", name="The run has removed rollouts").click()
        until(page, "document.querySelectorAll('.rollouts li').length === 3")
        press(page, "1")
        page.get_by_text("step 3 of 20").wait_for()
        write_run(tmp_path, {"status": "finished"})
        see(page, ".card .is-finished")
    # The server has ended.
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    see(page, "#banner.is-error")
    assert "vf-rl view" in text(page, "#banner")
    page.close()
    assert all("Failed to fetch" in e or "ERR_CONNECTION" in e for e in open_page.errors)
    open_page.errors.clear()


def write_odd_runs(folder):
    (folder / "empty").mkdir(parents=True)
    numbers = [{"step": 1, "loss": None, "reward": 0.5}, "no json\n", {"step": 2, "reward": None}]
    write_lines(folder / "no-rollouts/metrics.jsonl", *numbers)
    write_fake_run(folder / "one-step", 8, 1)
    write_fake_run(folder / "killed", 40, 4)
    gone = {"status": "running", "pid": 2**22 + 1, "host": socket.gethostname(), "ended_at": None}
    write_run(folder / "killed", gone)
    for path in (folder / "killed").iterdir():
        os.utime(path, (1.0, 1.0))
    write_rows(folder / "unreadable", make_row(1), make_row(2))
    (folder / "unreadable/rollouts/step-000002.parquet").write_bytes(b"PAR1 and no more")
    (folder / "unreadable/run.json").write_text("{")


def test_odd_runs_show_what_they_have_and_say_what_is_wrong(open_page, tmp_path):
    write_odd_runs(tmp_path)
    with serving(tmp_path / "empty", tmp_path) as client:
        page = open_page(f"{client.base_url}/?token=secret-token")
        see(page, ".card")
        cards = {card.split("\n")[0]: card for card in texts(page, ".card")}
        for name, said in (
            ("empty", "no files yet"),
            ("one-step", "finished"),
            ("killed", "lost: its process is gone"),
            ("no-rollouts", "No rollouts on disk"),
            ("no-rollouts", "loss was not a finite number once, first in step 1"),
            ("no-rollouts", "1 lines cannot be read"),
            ("unreadable", "run.json cannot be read"),
            ("unreadable", "step-000002.parquet cannot be read"),
        ):
            assert said in cards[name]
        go(page, "#/time", ".verdict")
        assert "No step has been timed yet." in texts(page, ".verdict")
        go(page, "#/rollouts?run=no-rollouts", ".count")
        page.get_by_text("This run has no rollouts on disk").wait_for()
        go(page, "#/rollouts?run=unreadable", ".rollouts a")
        assert page.locator(".rollouts a").count() == 1
        for part in ("#/options", "#/rollouts?run=empty"):
            go(page, part)
        go(page, "#/rollouts?run=gone&number=99", ".detail-side .error")
        assert "there is no run 'gone'" in text(page, ".detail-side .error")
        until(page, "document.querySelector('.count').textContent.includes('no run')")
        assert all("gone" in error or "404" in error for error in open_page.errors)
        open_page.errors.clear()
        page.close()
    one_file.write_page(Runs([tmp_path]), tmp_path / "page.html", 2_000_000)
    page = open_page(f"file://{tmp_path}/page.html")
    see(page, ".card")
    assert page.locator(".card").count() == 4  # not the empty one


def write_hostile_run(folder):
    function = {"name": HOSTILE, "arguments": HOSTILE}
    messages = [
        {"role": HOSTILE, "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE,
         "tool_calls": [{"id": HOSTILE, "function": function}]},
        {"role": "tool", "content": "\u202e\ud800\x00" + HOSTILE, "tool_call_id": HOSTILE},
    ]  # fmt: skip
    turns = [{"message": 1, "begin_s": 0, "end_s": 1, "finish_reason": HOSTILE}]
    row = make_row(1, env=HOSTILE, role=HOSTILE, messages=messages, turns=turns)
    row |= {"rewards": [{"name": HOSTILE, "value": 1}], "other_branches": [messages]}
    write_rows(folder, row, {**row, "error": HOSTILE, "reward": None}, {**row, "messages": None})
    run = {"model": HOSTILE, "status": HOSTILE, "args": {HOSTILE: HOSTILE, "x": [HOSTILE]}}
    write_run(folder, {**run, "versions": {HOSTILE: HOSTILE}, "max_steps": HOSTILE})
    write_lines(folder / "metrics.jsonl", {"step": 1, HOSTILE: 1.0, "reward": 0.5, "step_s": 1})


@pytest.mark.slow
def test_what_models_write_is_text_on_the_page_and_in_the_file(open_page, tmp_path):
    write_hostile_run(tmp_path / "run")
    one_file.write_page(Runs([tmp_path / "run"]), tmp_path / "page.html", 2_000_000)
    tabs = [f"#/rollouts?number={number}&tab={tab}" for number in range(3) for tab in TABS]
    with serving(tmp_path / "run") as client:
        for start in (f"{client.base_url}/?token=secret-token", f"file://{tmp_path}/page.html"):
            page = open_page(start)
            page.locator(".card").wait_for()
            page.locator("summary", has_text="More").click()
            visit(page, *PARTS, *tabs)
            go(page, "#/rollouts?number=0", ".message")
            assert HOSTILE in text(page, ".message .text")
            assert page.evaluate("window.hacked") is None
            assert page.locator("img").count() == 0 == page.locator("main script").count()
            page.close()


def test_the_file_works_alone_with_its_sample(open_page, two_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(browse, "MAX_TOKENS", 1)
    one_file.write_page(Runs([two_runs]), tmp_path / "page.html", 400_000)
    assert (tmp_path / "page.html").stat().st_size <= 400_000
    page = open_page(f"file://{tmp_path}/page.html", offline=True)
    see(page, "#chart-reward canvas")
    sample = text(page, "#sample")
    assert "first:" in sample and "rollouts (whole groups from all over the run)" in sample
    press(page, "3")
    see(page, ".rollouts a")
    page.locator("#filter-kind").select_option("with_tokens")
    until(page, "location.hash.includes('with_tokens')")
    page.locator(".rollouts a").first.click()
    see(page, ".message")
    press(page, "t")
    see(page, ".token[data-i]")
    assert page.locator(".token[data-i]").count() == 1
    said = r"The first 1 token \(\d+ more are not in this page\)"
    assert re.search(said, text(page, ".readout"))
    assert page.get_by_role("button", name="More tokens").count() == 0
    press(page, "g")
    see(page, ".column")
    resources = page.evaluate("JSON.stringify(performance.getEntriesByType('resource'))")
    assert json.loads(resources) == []
