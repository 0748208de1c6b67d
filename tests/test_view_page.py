"""The page about runs in headless Chromium."""

import json
import os
import re
import shutil
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import sync_playwright

from tests.fake_run import write_fake_run
from tests.test_rollouts import make_row, read, write_rows
from tests.test_view import HOSTILE, serving, write_lines
from verifiers_rl.json_text import as_json
from verifiers_rl.report.run_folder import remove_rollouts, write_run
from verifiers_rl.view import one_file
from verifiers_rl.view.runs import Runs, ViewError

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

    def open_page(address, width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
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
        name = part.removeprefix("#/").partition("?")[0]
        go(page, part, f"main[data-part={name}] *")
        page.wait_for_timeout(60)  # for what it fetches
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), part


# --- Curves ---------------------------------------------------------------------------------------


def test_the_overview_shows_how_two_runs_are_and_leads_to_the_rollouts_of_a_step(
    open_page, address
):
    page = open_page(address)
    see(page, "#chart-reward canvas")
    assert "token" not in page.url
    first = text(page, ".card")
    assert "step 21 of 21" in first and "finished" in first
    assert "error_share" in first  # one rollout in a hundred has failed
    rows = texts(page, "section[aria-label='Different options'] tbody tr")
    assert [row.split()[0] for row in rows] == ["max_steps", "batch_size", "learning_rate"]
    page.locator("#chart-reward .plot").focus()
    press(page, *["ArrowRight"] * 3)
    legend = text(page, "#chart-reward .now")
    assert "first" in legend and "second" in legend and legend.endswith("step 3")
    press(page, "Enter")
    page.locator(".pinned a").first.click()
    see(page, ".rollouts a")
    assert "from_step=3&to_step=3" in page.url
    assert all("step 3" in about for about in texts(page, ".about"))
    # A run can be left out, and the address keeps that.
    press(page, "1")
    page.get_by_role("checkbox", name="second").uncheck()
    until(page, "document.querySelectorAll('.card').length === 1")
    page.reload()
    see(page, "#chart-reward canvas")
    assert "runs=first" in page.url and page.locator(".card").count() == 1


def test_two_runs_that_differ_by_one_line_of_a_loss_are_told_apart(open_page, tmp_path):
    for name, line in (("first", "old"), ("second", "new")):
        code = {"my_loss": [name[0] * 64, f"def mine(inputs):\n    {line}\n"]}
        run = {"status": "finished", "args": {}, "versions": {}, "code": code}
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, run)
    with serving(tmp_path) as client:
        page = open_page(f"{client.base_url}/?token=secret-token")
        see(page, ".diff pre")
        assert text(page, ".diff summary") == "my_loss: first → second"
        assert texts(page, ".diff-old") == ["-     old"]
        assert texts(page, ".diff-new") == ["+     new"]


def test_no_part_scrolls_sideways_on_a_phone(open_page, address):
    page = open_page(address, 390, color_scheme="dark")
    see(page, ".card")
    visit(page, *PARTS, *(f"#/rollouts?run=first&number=3&tab={tab}" for tab in TABS))


# --- Rollouts -------------------------------------------------------------------------------------


def test_rollouts_are_filtered_and_the_address_keeps_the_filter(open_page, address, two_runs):
    page = open_page(address + "#/rollouts?run=first")
    see(page, ".rollouts a")
    assert page.locator(".rollouts li").count() == 50
    page.get_by_role("button", name="More (").click()
    until(page, "document.querySelectorAll('.rollouts li').length === 100")
    page.locator("#filter-kind").select_option("failed")
    see(page, ".flag-failed")
    page.reload()
    see(page, ".flag-failed")
    num_failed = sum(row["error"] is not None for row in read(two_runs / "first"))
    assert page.locator(".rollouts li").count() == num_failed
    page.get_by_role("button", name="Clear").click()
    press(page, "/")
    page.keyboard.type("calculate")
    until(page, "document.querySelector('.count').textContent.includes('hits')")
    page.locator(".rollouts a").first.click()
    assert text(page, ".message mark").lower() == "calculate"
    assert texts(page, ".span-title")[:3] == ["turn 1", "calculate", "turn 2"]
    assert "expression" in text(page, ".call .text")


def test_tokens_are_colored_by_each_of_their_numbers_and_by_their_weight_under_a_loss(
    open_page, tmp_path
):
    write_fake_run(tmp_path, 8, 1, tokens_of=1)
    row, *_ = read(tmp_path)
    places = [t for t, is_loss in enumerate(row["loss_mask"]) if is_loss]
    num, written = len(places), tmp_path / "replay/step-000001.parquet"
    columns = {"rollout": [0] * num, "token": places}
    columns["trainer_logprob"] = [row["trainer_logprobs"][t] for t in places]
    columns |= {"a": [-1.0] * num, "b": [0.0] * num}
    written.parent.mkdir()
    pq.write_table(pa.table(columns), written)
    with serving(tmp_path) as client:
        part = "?token=secret-token#/rollouts?number=0&tab=tokens"
        page = open_page(f"{client.base_url}/{part}", color_scheme="dark")
        tokens = page.locator(".token[data-i]")
        token = tokens.nth(places[0])
        for loss, color in (("a", "rgb(124, 192, 255)"), ("b", "rgb(22, 25, 29)")):
            page.get_by_role("radio", name=loss, exact=True).check()
            assert token.evaluate("token => token.style.background") == color
        token.hover()
        readout = text(page, ".readout")
        assert f"id {places[0]}" in readout and "weight a -1 weight b 0" in readout
        assert "".join(tokens.all_inner_texts()).split() == "".join(row["token_texts"]).split()
        looks, kinds = set(), "logprob trainer_logprob ratio entropy advantage version mask"
        for name in kinds.split():
            page.locator(f"input[value={name}]").check()
            looks.add(tuple(tokens.evaluate_all("tokens => tokens.map(t => t.outerHTML)")))
        assert len(looks) == 7
        assert page.locator(".tokens .token-masked").count() == sum(row["is_masked"])
        # Another run has the folder.
        columns["trainer_logprob"][0] -= 1
        pq.write_table(pa.table(columns), written)
        page.reload()
        token.wait_for()
        assert page.locator(".choice").count() == 1


# --- Runs that change, odd runs, hostile runs -----------------------------------------------------


@pytest.mark.slow
def test_the_page_follows_a_run_that_goes_on_and_one_that_is_resumed(open_page, tmp_path):
    def train(*steps):
        for step in steps:
            write_rows(tmp_path, make_row(step, content=f"of step {step}"), first=step)
            write_lines(tmp_path / "metrics.jsonl", {"step": step, "reward": step / 10})

    write_run(tmp_path, {"status": "running", "pid": os.getpid(), "max_steps": 20})
    with serving(tmp_path) as client:
        page = open_page(f"{client.base_url}/?token=secret-token")
        train(1, 2, 3)
        page.get_by_text("step 3 of 20").wait_for()
        press(page, "3")
        page.get_by_text("of step 3").wait_for()
        train(4, 5, 6)
        page.get_by_role("button", name="3 new rollouts: show").click()
        page.get_by_text("of step 6").wait_for()
        # It is resumed from step 2: the rows after it are removed on both sides.
        write_lines(tmp_path / "metrics.jsonl", {"step": 1, "reward": 0.0}, mode="w")
        remove_rollouts(tmp_path, behind=2)
        train(3)
        page.get_by_role("button", name="The run has removed rollouts").click()
        until(page, "document.querySelectorAll('.rollouts li').length === 3")
        press(page, "1")
        page.get_by_text("step 3 of 20").wait_for()
    # The server has ended.
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    see(page, "#banner.is-error")
    page.close()
    assert all("Failed to fetch" in e or "ERR_CONNECTION" in e for e in open_page.errors)
    open_page.errors.clear()


def test_odd_runs_show_what_they_have_and_say_what_is_wrong(open_page, tmp_path):
    (tmp_path / "empty").mkdir()
    numbers = [{"step": 1, "loss": None, "reward": 0.5}, "no json\n", {"step": 2, "reward": None}]
    write_lines(tmp_path / "no-rollouts/metrics.jsonl", *numbers)
    unreadable = tmp_path / "unreadable"
    write_rows(unreadable, make_row(1), make_row(2))
    (unreadable / "rollouts/step-000002.parquet").write_bytes(b"PAR1 and no more")
    (unreadable / "run.json").write_text("{")
    with serving(tmp_path / "empty", tmp_path) as client:
        page = open_page(f"{client.base_url}/?token=secret-token")
        see(page, ".card")
        cards = {card.split("\n")[0]: card for card in texts(page, ".card")}
        for name, said in (
            ("empty", "no files yet"),
            ("no-rollouts", "No rollouts on disk"),
            ("no-rollouts", "loss was not a finite number once, first in step 1"),
            ("no-rollouts", "1 lines cannot be read"),
            ("unreadable", "run.json cannot be read"),
            ("unreadable", "step-000002.parquet cannot be read"),
        ):
            assert said in cards[name]
        visit(page, "#/time", "#/options", "#/rollouts?run=empty", "#/rollouts?run=no-rollouts")
        go(page, "#/rollouts?run=unreadable", ".rollouts a")
        assert page.locator(".rollouts a").count() == 1


def write_hostile_run(folder):
    function = {"name": HOSTILE, "arguments": HOSTILE}
    said = {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE}
    messages = [
        {"role": HOSTILE, "content": "\u202e\ud800\x00" + HOSTILE, "tool_call_id": HOSTILE},
        {**said, "tool_calls": [{"id": HOSTILE, "function": function}]},
    ]
    turns = [{"message": 1, "begin_s": 0, "end_s": 1, "finish_reason": HOSTILE}]
    messages = json.loads(as_json(messages))  # as those of a rollout
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
            page.locator("summary", has_text="More").click()
            visit(page, *PARTS, *tabs)
            go(page, "#/rollouts?number=0", ".message")
            assert HOSTILE in text(page, ".message .text")
            assert page.evaluate("window.hacked") is None
            assert page.locator("img").count() == 0 == page.locator("main script").count()


def test_the_file_works_alone_with_its_sample(open_page, two_runs, tmp_path, monkeypatch):
    monkeypatch.setattr("verifiers_rl.view.browse.MAX_TOKENS", 1)
    with pytest.raises(ViewError, match="raise --max-mb"):
        one_file.write_page(Runs([two_runs]), tmp_path / "page.html", 50_000)
    one_file.write_page(Runs([two_runs]), tmp_path / "page.html", 400_000)
    assert (tmp_path / "page.html").stat().st_size <= 400_000
    page = open_page(f"file://{tmp_path}/page.html", offline=True)
    see(page, "#chart-reward canvas")
    assert "rollouts (whole groups from all over the run)" in text(page, "#sample")
    press(page, "3")
    page.locator("#filter-kind").select_option("with_tokens")
    until(page, "location.hash.includes('with_tokens')")
    page.locator(".rollouts a").first.click()
    see(page, ".message")
    press(page, "t")
    see(page, ".token[data-i]")
    said = r"The first 1 token \(\d+ more are not in this page\)"
    assert re.search(said, text(page, ".readout"))
    press(page, "g")
    see(page, ".column")
    rewards = [float(said) for said in texts(page, ".column .reward") if said != "no reward"]
    assert rewards == sorted(rewards, reverse=True) and page.locator(".column").count() == 8
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0
