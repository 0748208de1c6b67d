"""The page about runs in headless Chromium."""

import json
import os
import shutil
import socket
import time

import pytest
from playwright.sync_api import sync_playwright

from tests.fake_run import write_fake_run
from tests.test_rollouts import make_row, make_tokens, read, write_rows
from tests.test_view import HOSTILE, serving, write_lines
from verifiers_rl.report.run_folder import remove_rollouts, write_run
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


def go(page, part, selector):
    page.evaluate("part => { location.hash = part; }", part)
    page.locator(selector).first.wait_for()


def until(page, condition):
    """Wait for a condition. The page's own policy keeps Playwright's way of waiting out of it."""
    deadline = time.monotonic() + 15
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def scrolls_sideways(page):
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


# --- Curves ---------------------------------------------------------------------------------------


def test_the_overview_shows_how_two_runs_are_and_what_differs(open_page, address):
    page = open_page(address)
    page.locator("#chart-reward canvas").wait_for()
    assert "token" not in page.url and page.title() == "2 runs · Overview"
    cards = page.locator(".card").all_inner_texts()
    assert "step 21 of 21" in cards[0] and "finished" in cards[0] and "first" in cards[0]
    assert "error_share" in cards[0]  # one rollout in a hundred has failed
    rows = page.locator("section[aria-label='Different options'] tbody tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["max_steps", "batch_size", "learning_rate"]
    assert "0.00001" in rows[2] and "0.00002" in rows[2]
    legend = page.locator("#chart-reward .now").inner_text()
    assert "first" in legend and "second" in legend
    assert "from 0." in page.locator("#chart-reward .plot").get_attribute("aria-label")
    # A run can be left out, and the address keeps that.
    page.get_by_role("checkbox", name="second").uncheck()
    until(page, "document.querySelectorAll('.card').length === 1")
    assert "runs=first" in page.url
    page.reload()
    page.locator("#chart-reward canvas").wait_for()
    assert page.locator(".card").count() == 1


def test_a_curve_is_read_and_zoomed_with_keys_and_leads_to_the_rollouts_of_a_step(
    open_page, address
):
    page = open_page(address)
    plot = page.locator("#chart-reward .plot")
    plot.locator("canvas").wait_for()
    plot.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator("#chart-reward .now").inner_text().endswith("step 3")
    page.keyboard.press("Enter")
    link = page.locator(".pinned a").first
    assert "Step 3" in page.locator(".pinned").inner_text()
    link.click()
    page.locator(".rollouts a").first.wait_for()
    assert "from_step=3&to_step=3" in page.url
    assert all("step 3" in text for text in page.locator(".about").all_inner_texts())
    page.go_back()
    box = page.locator("#chart-reward .u-over").bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 150, box["y"] + 60, steps=5)
    page.mouse.up()
    page.get_by_role("button", name="Zoom out").click()
    assert page.get_by_role("button", name="Zoom out").is_hidden()
    page.locator("#smooth").fill("0.8")
    page.locator("#axis").select_option("hours")
    assert page.locator("#chart-reward .plot canvas").count() == 1


def test_the_time_of_steps_is_split_into_phases_that_sum_up(open_page, address):
    page = open_page(address + "#/time")
    page.locator(".bar").first.wait_for()
    shares = page.locator(".shares").first.locator("td:nth-child(2)").all_inner_texts()
    assert 97 <= sum(int(share.split()[0]) for share in shares) <= 103
    assert "waits" in page.locator(".verdict").first.inner_text()
    assert page.locator(".time canvas").count() == 2


def test_no_part_scrolls_sideways_on_a_phone_or_a_desk_in_either_theme(open_page, address):
    for viewport, scheme in ((PHONE, "dark"), (WIDE, "light")):
        page = open_page(address, viewport, color_scheme=scheme)
        page.locator(".card").first.wait_for()
        for part in (*PARTS, *(f"#/rollouts?run=first&number=3&tab={tab}" for tab in
                               ("messages", "tokens", "group"))):  # fmt: skip
            go(page, part, {"#/": "main *"}.get(part[:2], "main *"))
            page.wait_for_timeout(50)
            assert not scrolls_sideways(page), (part, viewport)


def test_the_theme_follows_the_system_until_one_is_chosen(open_page, address):
    page = open_page(address, color_scheme="dark")
    page.locator("#chart-reward canvas").wait_for()
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.locator("#theme").click()  # light
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    page.reload()
    page.locator("#chart-reward canvas").wait_for()
    assert dark != light == page.evaluate(ground)
    page.locator("#theme").click()
    assert page.evaluate(ground) == dark


# --- Rollouts -------------------------------------------------------------------------------------


def test_rollouts_are_filtered_and_the_address_keeps_the_filter(open_page, address, two_runs):
    page = open_page(address + "#/rollouts?run=first")
    page.locator(".rollouts a").first.wait_for()
    rollouts = read(two_runs / "first")
    assert page.locator(".rollouts li").count() == 50
    assert page.locator(".count").inner_text() == f"{len(rollouts)} rollouts"
    page.get_by_role("button", name="More (").click()
    until(page, "document.querySelectorAll('.rollouts li').length === 100")
    page.locator("#filter-kind").select_option("failed")
    until(page, "document.querySelectorAll('.flag-failed').length > 0")
    num_failed = sum(row["error"] is not None for row in rollouts)
    assert page.locator(".rollouts li").count() == num_failed > 0
    page.reload()
    page.locator(".flag-failed").first.wait_for()
    assert page.locator("#filter-kind").input_value() == "failed"
    page.get_by_role("button", name="Clear").click()
    page.keyboard.press("/")
    page.keyboard.type("calculate")
    until(page, "document.querySelector('.count').textContent.includes('hits')")
    page.locator(".rollouts a").first.click()
    assert page.locator(".message mark").first.inner_text().lower() == "calculate"
    page.locator(".histogram button:not([disabled])").last.click()
    until(page, "location.hash.includes('min_reward')")
    page.locator("#filter-run").select_option("second")
    until(page, "location.hash.includes('run=second')")


def test_keys_go_through_the_list_the_tabs_and_the_group(open_page, address):
    page = open_page(address + "#/rollouts?run=first&kind=with_tokens&order=oldest")
    page.locator(".rollouts a").first.wait_for()
    number = "Number(new URLSearchParams(location.hash.split('?')[1]).get('number'))"
    page.keyboard.press("j")
    page.locator(".message").first.wait_for()
    first = page.evaluate(number)
    page.keyboard.press("j")
    second = page.evaluate(number)
    page.keyboard.press("k")
    assert page.evaluate(number) == first != second
    assert page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
    page.keyboard.press("g")
    page.locator(".column").first.wait_for()
    assert page.locator(".column").count() == 8
    rewards = [float(text) for text in page.locator(".column .reward").all_inner_texts()
               if text != "no reward"]  # fmt: skip
    assert rewards == sorted(rewards, reverse=True)
    assert page.locator(".group-histogram .bin").count() == 10
    page.keyboard.press("]")
    until(page, f"{number} === {first + 1}")
    page.keyboard.press("t")
    page.locator(".token").first.wait_for()
    page.locator(".tokens").focus()
    page.keyboard.press("End")
    assert "ratio" in page.locator(".readout").inner_text()
    page.keyboard.press("Escape")
    page.locator(".nothing").wait_for()
    assert page.evaluate("document.activeElement.tagName") == "A"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("1")
    page.locator(".card").first.wait_for()
    page.reload()
    page.locator(".card").first.wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_tokens_are_colored_by_each_of_their_numbers(open_page, address, two_runs):
    rollouts = read(two_runs / "first")
    number = next(row for row in range(len(rollouts)) if rollouts[row]["has_tokens"])
    row = rollouts[number]
    page = open_page(f"{address}#/rollouts?run=first&number={number}&tab=tokens")
    page.locator(".token[data-i]").first.wait_for()
    assert page.locator(".token[data-i]").count() == len(row["token_ids"])
    text = "".join(page.locator(".token[data-i]").all_inner_texts()).split()
    assert text == "".join(row["token_texts"]).split()
    looks = set()
    look = "[...document.querySelectorAll('.token[data-i]')].map(t => t.outerHTML).join()"
    for name in ("logprob", "trainer_logprob", "ratio", "entropy", "advantage", "version", "mask"):
        page.locator(f"input[value={name}]").check()
        looks.add(page.evaluate(look))
        assert page.locator(".legend").inner_text() != ""
    assert len(looks) == 7
    masked = sum(row["is_masked"])
    assert page.locator(".tokens .token-masked").count() == masked
    place = row["loss_mask"].index(True)
    page.locator(".token[data-i]").nth(place).hover()
    readout = page.locator(".readout").inner_text()
    assert f"id {row['token_ids'][place]}" in readout and "in the loss" in readout


def test_a_rollout_has_its_timeline_its_calls_and_its_reasoning(open_page, address, two_runs):
    rollouts = read(two_runs / "first")
    number = next(
        i for i, row in enumerate(rollouts)
        if row["num_turns"] == 2 and row["messages"][2]["reasoning_content"] and not row["error"]
    )  # fmt: skip
    row = rollouts[number]
    page = open_page(f"{address}#/rollouts?run=first&number={number}")
    page.locator(".message").first.wait_for()
    assert page.locator(".span-title").all_inner_texts() == ["turn 1", "calculate", "turn 2"]
    assert "in tools" in page.locator(".timeline summary").inner_text()
    reasoning = page.locator(".reasoning .text").first.inner_text()
    assert reasoning == row["messages"][2]["reasoning_content"]
    assert "expression" in page.locator(".call .text").inner_text()
    page.locator(".span").nth(1).click()
    assert "role-tool" in page.evaluate("document.activeElement.className")


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
        page.locator(".card .is-empty").wait_for()
        write_run(tmp_path, run)
        train(1, 2, 3)
        page.get_by_text("step 3 of 20").wait_for()
        page.locator("#chart-reward canvas").wait_for()
        page.keyboard.press("3")
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
        page.keyboard.press("1")
        page.get_by_text("step 3 of 20").wait_for()
        write_run(tmp_path, {"status": "finished"})
        page.locator(".card .is-finished").wait_for()
    # The server has ended.
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.locator("#banner.is-error").wait_for()
    assert "vf-rl view" in page.locator("#banner").inner_text()
    page.close()
    assert all("Failed to fetch" in e or "ERR_CONNECTION" in e for e in open_page.errors)
    open_page.errors.clear()


def odd_runs(folder):
    (folder / "empty").mkdir(parents=True)
    (folder / "no-rollouts").mkdir()
    numbers = [{"step": 1, "loss": "nan", "reward": 0.5}, "no json\n", {"step": 2, "reward": "inf"}]
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
    odd_runs(tmp_path)
    with serving(tmp_path / "empty", tmp_path) as client:
        page = open_page(f"{client.base_url}/?token=secret-token")
        page.locator(".card").first.wait_for()
        cards = {text.split("\n")[0]: text for text in page.locator(".card").all_inner_texts()}
        assert "no files yet" in cards["empty"] and "finished" in cards["one-step"]
        assert "lost: its process is gone" in cards["killed"]
        assert "No rollouts on disk" in cards["no-rollouts"]
        assert "loss was not a finite number once, first in step 1" in cards["no-rollouts"]
        assert "1 lines cannot be read" in cards["no-rollouts"]
        assert "run.json cannot be read" in cards["unreadable"]
        assert "step-000002.parquet cannot be read" in cards["unreadable"]
        go(page, "#/time", ".verdict")
        assert "No step has been timed yet." in page.locator(".verdict").all_inner_texts()
        go(page, "#/rollouts?run=no-rollouts", ".count")
        page.get_by_text("This run has no rollouts on disk").wait_for()
        go(page, "#/rollouts?run=unreadable", ".rollouts a")
        assert page.locator(".rollouts a").count() == 1
        for part in ("#/options", "#/rollouts?run=empty"):
            go(page, part, "main *")
        go(page, "#/rollouts?run=gone&number=99", ".detail-side .error")
        assert "there is no run 'gone'" in page.locator(".detail-side .error").inner_text()
        until(page, "document.querySelector('.count').textContent.includes('no run')")
        assert all("gone" in error or "404" in error for error in open_page.errors)
        open_page.errors.clear()
        page.close()
    one_file.write_page(Runs([tmp_path]), tmp_path / "page.html", 2_000_000)
    page = open_page(f"file://{tmp_path}/page.html")
    page.locator(".card").first.wait_for()
    assert page.locator(".card").count() == 4  # not the empty one


def hostile_run(folder):
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
    hostile_run(tmp_path / "run")
    one_file.write_page(Runs([tmp_path / "run"]), tmp_path / "page.html", 2_000_000)
    with serving(tmp_path / "run") as client:
        for start in (f"{client.base_url}/?token=secret-token", f"file://{tmp_path}/page.html"):
            page = open_page(start)
            page.locator(".card").wait_for()
            page.locator("summary", has_text="More").click()
            for part in (*PARTS, *(f"#/rollouts?number={n}&tab={tab}" for n in range(3)
                                   for tab in ("messages", "group", "tokens"))):  # fmt: skip
                go(page, part, "main *")
                page.wait_for_timeout(60)
            go(page, "#/rollouts?number=0", ".message")
            assert HOSTILE in page.locator(".message .text").first.inner_text()
            assert page.evaluate("window.hacked") is None
            assert page.locator("img").count() == 0 == page.locator("main script").count()
            assert not scrolls_sideways(page)
            page.close()


def test_the_file_says_which_tokens_it_lacks(open_page, tmp_path, monkeypatch):
    monkeypatch.setattr(browse, "MAX_TOKENS", 1)
    write_rows(tmp_path / "run", make_row(1, **make_tokens(["a", "b"])))
    one_file.write_page(Runs([tmp_path / "run"]), tmp_path / "page.html", 2_000_000)
    page = open_page(f"file://{tmp_path}/page.html#/rollouts?number=0&tab=tokens", offline=True)
    page.locator(".token[data-i]").first.wait_for()
    assert page.locator(".token[data-i]").count() == 1
    readout = page.locator(".readout").inner_text()
    assert "The first 1 token (1 more are not in this page)" in readout
    assert page.get_by_role("button", name="More tokens").count() == 0


def test_the_file_works_alone_with_its_sample(open_page, two_runs, tmp_path):
    one_file.write_page(Runs([two_runs]), tmp_path / "page.html", 400_000)
    assert (tmp_path / "page.html").stat().st_size <= 400_000
    page = open_page(f"file://{tmp_path}/page.html", offline=True)
    page.locator("#chart-reward canvas").wait_for()
    sample = page.locator("#sample").inner_text()
    assert "first:" in sample and "rollouts (whole groups from all over the run)" in sample
    page.keyboard.press("3")
    page.locator(".rollouts a").first.wait_for()
    page.locator("#filter-kind").select_option("with_tokens")
    until(page, "location.hash.includes('with_tokens')")
    page.locator(".rollouts a").first.click()
    page.locator(".message").first.wait_for()
    for key, selector in (("t", ".token"), ("g", ".column")):
        page.keyboard.press(key)
        page.locator(selector).first.wait_for()
    page.locator("#filter-order").select_option("highest")
    until(page, "location.hash.includes('highest')")
    rewards = [float(r) for r in page.locator(".rollouts .reward").all_inner_texts() if len(r) > 1]
    assert rewards == sorted(rewards, reverse=True)
    assert (
        json.loads(page.evaluate("JSON.stringify(performance.getEntriesByType('resource'))")) == []
    )
