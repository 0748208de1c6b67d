"""What the page about runs shows, without a browser: runs, rollouts, the server, the file."""

import base64
import gzip
import hashlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from urllib.parse import parse_qsl

import httpx
import numpy as np
import pytest

from tests.fake_run import write_fake_run
from tests.helpers import ROOT, check_lines
from tests.test_rollouts import make_row, make_tokens, write_rows
from verifiers_rl.cli import view as command
from verifiers_rl.report.run_folder import remove_rollouts, write_run
from verifiers_rl.view import browse, one_file, server
from verifiers_rl.view.browse import Filter, group_of, page_of, rollout_of, select, tokens_of
from verifiers_rl.view.runs import MetricsFile, Run, Runs, ViewError

HERE = socket.gethostname()


def data_of(page):
    """The data inside a page that is one file."""
    (packed,) = re.findall(rb'id="data">([^<]*)<', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def written(folder, *rows):
    """The rollouts of a run after these were written, too."""
    write_rows(folder, *rows)
    return Run("a", folder).rollouts()


def column(found, name="step"):
    """One value of each row of a page."""
    return [row[name] for row in found["rows"]]


def write_lines(path, *rows, mode="a"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.writelines(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


# --- Runs -----------------------------------------------------------------------------------------


def test_runs_are_found_in_folders_and_have_names_of_their_own(tmp_path):
    (tmp_path / "b/deep/er/other").mkdir(parents=True)
    write_lines(tmp_path / "b/rl/run.json", {})
    for folder in ("a/rl", "b/rl/checkpoint-3", "c/.hidden/no"):  # the second is inside a run
        write_lines(tmp_path / folder / "metrics.jsonl", {"step": 1})
    runs = Runs([tmp_path / "a/rl", tmp_path])
    assert [run.name for run in runs.find()] == ["a/rl", "b/rl"]
    write_lines(tmp_path / "b/deep/er/other/metrics.jsonl")  # it begins later
    assert [run.name for run in runs.find()] == ["a/rl", "other", "b/rl"]
    assert runs["other"].folder == tmp_path / "b/deep/er/other"
    (tmp_path / "a/rl/metrics.jsonl").unlink()
    assert [run.name for run in Runs([tmp_path]).find()] == ["other", "rl"]


def test_new_lines_of_metrics_are_read_once_and_a_replaced_file_from_its_begin(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert metrics.refresh().num_rows == 0
    write_lines(path, {"step": 1, "loss": 0.5}, '{"step": 2, "lo')
    assert metrics.refresh().num_rows == 1  # the second line is not finished
    write_lines(path, 'ss": null, "reward": 1}\n', "oh\n", "[1]\n", {"step": "3"}, {"step": 3})
    metrics.refresh()
    assert metrics.num_rows == 3 and metrics.num_unreadable == 3 and metrics.generation == 0
    assert metrics.not_finite == {"loss": (1, 2)}
    assert list(metrics.columns["step"]) == [1, 2, 3]
    assert [math.isnan(value) for value in metrics.columns["reward"]] == [True, False, True]
    # A resumed run leaves the lines up to its checkpoint, and is soon longer than before.
    aside = tmp_path / "aside"
    write_lines(aside, {"step": 1, "loss": 0.5}, *({"step": n, "loss": 0.25} for n in range(2, 9)))
    aside.replace(path)
    metrics.refresh()
    assert metrics.generation == 1 and list(metrics.columns["step"]) == [*range(1, 9)]
    assert metrics.not_finite == {} and metrics.num_unreadable == 0
    path.unlink()
    assert metrics.refresh().num_rows == 0 and metrics.generation == 2


@pytest.mark.parametrize(
    "run, age_s, status",
    [
        ({"status": "running", "pid": os.getpid()}, 9999, "running"),
        ({"status": "running", "pid": 2**22 + 1}, 5, "running"),  # perhaps on another machine
        ({"status": "running", "pid": 2**22 + 1, "host": HERE}, 9999, "lost"),
        ({"status": "running", "pid": "?", "host": HERE}, 9999, "lost"),
        ({"status": "running", "pid": 2**22 + 1, "host": "another"}, 9999, "running"),
        ({"status": 3}, 0, "unknown"),
        (None, 0, "unknown"),
    ],
)
def test_the_status_of_a_run_is_what_its_files_and_its_process_say(tmp_path, run, age_s, status):
    write_lines(tmp_path / "metrics.jsonl", {"step": 4})
    if run is not None:
        write_run(tmp_path, run)
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - age_s,) * 2)
    state = Run("a", tmp_path).state()
    assert state["status"] == status and state["step"] == 4


def test_a_question_is_asked_again_if_a_file_was_replaced_meanwhile(tmp_path):
    write_rows(tmp_path, make_row(1), make_row(2, content="old"), make_row(3))
    run, asked = Run("a", tmp_path), []

    def question(rollouts):
        asked.append(len(rollouts))
        if len(asked) == 1:
            remove_rollouts(tmp_path, behind=1)
            write_rows(tmp_path, make_row(2, content="new"), first=2)
        else:  # which a file that is added does not change
            write_rows(tmp_path, make_row(4, None), first=3)
        return rollout_of(rollouts, 1)

    assert run.ask(question)["messages"][-1]["content"] == "new" and asked == [3, 2]


# --- A choice of rollouts -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chosen_from(tmp_path_factory):
    error = "TimeoutError: too Late"
    call = {"id": "c1", "function": {"name": "calculate", "arguments": '{"expression": "2*3"}'}}
    calling = [{"role": "assistant", "reasoning_content": "6?", "tool_calls": [call]}]
    rows = [
        make_row(1, 0.1, content="zero"),
        make_row(1, 0.9, content='said "Hi"\nand went'),
        make_row(2, None, error=error, in_loss=False, content="GRÖSSE"),
        make_row(2, 0.4, "eval", env="words", content="four"),
        make_row(2, 0.4, is_truncated=True, example=3, messages=calling, env="words"),
        make_row(3, 0.1, in_loss=False, other_branches=[[{"role": "user", "content": "aside"}]]),
        make_row(3, 0.2, has_tokens=True, content="x" * 500),
    ]
    return written(tmp_path_factory.mktemp("chosen"), *rows)


def test_a_filter_chooses_rollouts_in_its_order(chosen_from):
    """In view_filters.txt, each query with the numbers of what it finds (=>). Rollouts without a
    reward come last; SS is not ß; a role is no text.
    """
    lines = []
    for line in (ROOT / "tests" / "view_filters.txt").read_text().splitlines():
        query, _, _ = line.partition(" =>")
        wanted = Filter.parse(dict(parse_qsl(query)))
        found = page_of(chosen_from, wanted)
        numbers = column(found, "number")
        assert found["next"] is None and found["num_all"] == 7
        assert wanted.text or select(chosen_from, wanted).tolist() == numbers
        lines.append(" ".join([query, "=>", *map(str, numbers)]))
    check_lines(lines, "view_filters.txt")


@pytest.mark.parametrize(
    "wanted", ["from_step='x'", "min_reward='much'", "kind='odd'", "order='b'", "split='c'"]
)
def test_a_filter_that_cannot_be_is_an_error_that_names_it(wanted):
    with pytest.raises(ValueError, match=wanted):
        Filter.parse(dict(parse_qsl(wanted.replace("'", ""))))


def test_a_page_of_the_list_goes_on_where_the_last_one_ended(tmp_path):
    rows = [make_row(n, content=f"text {n % 2}") for n in range(13)]
    rollouts = written(tmp_path, *rows[:10])
    first = page_of(rollouts, Filter(), 0, 4)
    assert column(first) == [9, 8, 7, 6] and first["next"] == 4
    last = page_of(rollouts, Filter(), 8, 4)
    assert column(last) == [1, 0] and last["next"] is None
    found = page_of(rollouts, Filter(text="text 1"), 0, 2)
    assert column(found) == [9, 7] and found["next"] == 3
    assert page_of(rollouts, Filter(), 99)["rows"] == []
    # The run goes on, and the next page is of the rollouts that the first page was of.
    second = page_of(written(tmp_path, *rows[10:]), Filter(), 4, 4, upto=first["num_all"])
    assert column(second) == [5, 4, 3, 2] and second["next"] == 8
    assert second["num_chosen"] == second["num_all"] == 10


def test_a_search_ends_at_its_deadline_and_makes_progress_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(browse, "SEARCH_S", 0.0)
    rollouts = written(tmp_path, *(make_row(n // 25) for n in range(100)))
    for order in ("newest", "lowest"):
        place, places = 0, []
        while place is not None:
            found = page_of(rollouts, Filter(text=f"nowhere {order}", order=order), place)
            assert found["rows"] == []
            place = found["next"]
            places.append(place)
        assert places == [*range(1, 100), None]


def test_histograms_count_every_reward_once(tmp_path):
    found = browse.histogram(np.array([0, 0.1, math.nan, 1, 1], np.float32))
    assert (found["low"], found["high"]) == (0, 1) and sum(found["counts"]) == 4
    assert [n for n in found["counts"] if n] == [1, 1, 2]
    assert browse.histogram(np.array([0.5, 0.5])) == {"low": 0.5, "high": 0.5, "counts": [2]}
    # One for each column of steps, of training alone.
    rows = [make_row(*row) for row in ((1, 0.0), (1, 1.0), (2, 1.0), (3, 0.5), (4, 0.0), (4, None))]
    rollouts = written(tmp_path / "map", *rows, make_row(4, 1.0, "eval"))
    found = browse.rewards_over_steps(rollouts, num_columns=2)
    assert (found["first"], found["last"], found["steps_of_column"]) == (1, 4, 2)
    assert [(len(counts), sum(counts)) for counts in found["counts"]] == [(20, 3), (20, 2)]
    assert found["counts"][0][19] == 2 and found["counts"][1][10] == 1
    assert browse.rewards_over_steps(written(tmp_path / "none", make_row(1, None))) is None


def test_a_group_is_of_one_step_and_one_split_and_long_texts_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(browse, "_GROUP_TEXT", 5)
    rows = [make_row(1, group=0), make_row(1, group=1), make_row(1, group=1, content="123456789")]
    rows += [make_row(1, split="eval", group=1), make_row(2, group=1)]
    rollouts = written(tmp_path, *rows)
    found = group_of(rollouts, 2)
    assert [row["number"] for row in found["rollouts"]] == [1, 2] and found["num_more"] == 0
    assert found["rollouts"][1]["messages"][1]["content"] == "12345… (4 more characters)"
    assert rollout_of(rollouts, 2)["group_numbers"] == [1, 2]
    assert rollout_of(rollouts, 2)["messages"][1]["content"] == "123456789"
    assert rollout_of(rollouts, 5) is None is group_of(rollouts, -1)
    monkeypatch.setattr(browse, "MAX_GROUP", 1)
    assert group_of(rollouts, 2)["num_more"] == 1


def test_tokens_are_given_a_part_at_a_time_with_what_the_whole_has(tmp_path):
    tokens = make_tokens(["a", "é"], policy_versions=np.array([4, 6]))
    rollouts = written(tmp_path, make_row(**tokens), make_row())
    found = tokens_of(rollouts, 0, 1, 1)
    assert (found["num_tokens"], found["start"]) == (2, 1)
    assert (found["versions"], found["max_advantage"]) == ([4, 6], 1.0)
    assert found["trainer_logprobs"] == [None] and found["inference_logprobs"] == [-1.0]
    assert found["loss_mask"] == [True] and found["policy_versions"] == [6]
    assert found["token_texts"] == ["é"] and tokens_of(rollouts, 0)["token_texts"] == ["a", "é"]
    assert tokens_of(rollouts, 1) is None is tokens_of(rollouts, 7)


# --- The server -----------------------------------------------------------------------------------


@contextmanager
def serving(*paths):
    """A client of the page's server, which knows the token, and the server's address."""
    runs = Runs(paths)
    runs.find()
    listener = server.listen(0)
    served = server.make_server(server.make_app(runs, "secret-token"))
    thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=address, timeout=20, trust_env=False) as client:
            yield client
    finally:
        served.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write_fake_run(folder / "one", 200, 3)
    write_lines(folder / "two/metrics.jsonl", {"step": 1, "reward": None})
    with serving(folder) as client:
        yield client


@pytest.fixture
def known(client):
    """The client with the cookie."""
    client.get("/", params={"token": "secret-token"})
    yield client
    client.cookies.clear()


def test_nothing_is_answered_without_the_token(client):
    for path in ("/", "/static/main.js", "/api/runs", "/api/nothing", "/?token=", "/?token=secret"):
        response = client.get(path)
        assert response.status_code == 403 and "vf-rl view" in response.text, path
        assert "set-cookie" not in response.headers
    cookie = {"cookie": "vf-rl-view-000000000000=secret-token; a=b"}
    assert client.get("/api/runs", headers=cookie).status_code == 403


def test_the_address_with_the_token_gives_the_page_and_a_cookie_for_the_rest(client):
    response = client.get("/?token=secret-token")
    cookie = response.headers["set-cookie"]
    assert response.status_code == 200 and response.text.startswith("<!doctype html>")
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert client.get("/api/runs").json()["runs"][0]["name"] == "one"
    # Browsers send the cookies of other programs of this machine, whatever they hold.
    cookies = {"cookie": f'x={{"a": 1}}; {cookie.split(";")[0]}'}
    client.cookies.clear()
    assert client.get("/api/runs", headers=cookies).status_code == 200
    assert client.get("/api/runs").status_code == 403


def test_only_names_of_this_machine_are_served(known):
    assert known.get("/api/runs", headers={"host": "localhost:9999"}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "0.0.0.0"):
        assert known.get("/api/runs", headers={"host": host}).status_code == 400, host


def test_answers_keep_the_page_to_itself(known):
    headers = known.get("/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
    assert known.post("/api/runs").status_code == 405


def test_files_beside_the_pages_own_are_not_served(known):
    assert known.get("/static/main.js").headers["content-type"].startswith("text/javascript")
    assert known.get("/static/vendor/uPlot.min.css").status_code == 200
    for name in ("../server.py", "..%2fserver.py", "vendor/LICENSE", "/etc/passwd", "vendor"):
        assert known.get(f"/static/{name}").status_code == 404, name


def test_the_state_is_not_sent_again_while_nothing_changes(known):
    first = known.get("/api/runs")
    again = known.get("/api/runs", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert "secret-token" not in first.text and "pid" not in first.json()["runs"][0]["run"]


def test_a_question_that_has_no_answer_is_an_error_that_says_why(known):
    def ask(what, run="one", **params):
        response = known.get(f"/api/{what}", params={"run": run, **params})
        found = response.json()
        return found if response.status_code == 200 else (response.status_code, found["error"])

    assert ask("metrics", generation=0, start=2)["columns"]["step"] == [3]
    assert ask("metrics", generation=1, start=2)["columns"]["step"] == [1, 2, 3]  # not its own
    none = "there is no such rollout, or its tokens were not written"
    assert ask("rollout", number=10**6) == (404, none)
    assert ask("rollout", number="x") == (400, "number='x' is no number")
    assert ask("rollouts", kind="odd")[0] == 400
    assert ask("metrics", run="other") == (404, "there is no run 'other'; reload the page")
    assert ask("rollouts", "two") == ask("rewards", "two") == {}  # one without rollouts


# --- The page as one file -------------------------------------------------------------------------

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'


def test_the_policy_of_the_file_allows_exactly_its_own_scripts_and_styles():
    page = one_file.make_page({"runs": []}).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert "unsafe" not in policy and "default-src 'none'" in policy
    parts = re.findall(
        r"<(?:script(?: type=\"module\")?|style)>(.*?)</(?:script|style)>", page, re.S
    )
    digests = [base64.b64encode(hashlib.sha256(p.encode()).digest()).decode() for p in parts]
    assert len(parts) == 4
    assert sorted(re.findall(r"'sha256-([^']+)'", policy)) == sorted(digests)


@pytest.mark.slow
def test_the_file_keeps_to_its_size_with_whole_groups_from_all_over_the_run(tmp_path):
    write_fake_run(tmp_path / "run", 4000, 40)
    said = one_file.write_page(Runs([tmp_path]), tmp_path / "page.html", 500_000)
    page = (tmp_path / "page.html").read_bytes()
    assert 300_000 < len(page) <= 500_000
    (part,) = data_of(page)["runs"]
    rollouts = Run("a", tmp_path / "run").rollouts()
    numbers, num_all = [row["number"] for row in part["rollouts"]], len(rollouts)
    assert 100 < len(numbers) < num_all == part["state"]["num_rollouts"]
    assert f"{len(numbers):,} of {num_all:,} rollouts" in said[1]
    for number in numbers:
        assert {*rollout_of(rollouts, number)["group_numbers"]} <= {*numbers}
    assert {1, 20, 40} <= {row["step"] for row in part["rollouts"]}
    assert any(row["error"] for row in part["rollouts"])
    with pytest.raises(ViewError, match=r"has 0\.\d\d MB without rollouts; raise --max-mb"):
        one_file.write_page(Runs([tmp_path]), tmp_path / "page.html", 50_000)


def test_long_curves_are_means_over_neighbours_in_the_file(monkeypatch):
    monkeypatch.setattr(one_file, "MAX_ROWS", 2)
    columns = {"step": [1, 2, 3, 4], "x": [1.0, 2.0, None, 4.0], "x_max": [1, 9, None, None]}
    thin = one_file.thinned({"columns": columns, "generation": 0})
    assert thin["rows_of_one"] == 2
    assert thin["columns"] == {"step": [2, 4], "x": [1.5, 4.0], "x_max": [9, None]}
    assert one_file.thinned({"columns": {"step": [1, 2]}})["rows_of_one"] == 1


# --- The page's own files -------------------------------------------------------------------------


def test_the_vendored_charts_are_what_npm_had():
    folder = server.STATIC / "vendor"
    record = json.loads((folder / "vendored.json").read_text())
    assert {path.name for path in folder.iterdir()} == {*record["sha256"], "vendored.json"}
    for name, digest in record["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert f"(v{record['version']})" in (folder / "uPlot.iife.min.js").read_text()[:200]


def test_metrics_that_the_page_explains_are_documented():
    text = (server.STATIC / "metrics.js").read_text()
    table = text.partition("export const METRICS = {\n")[2].partition("\n};\n")[0]
    names = {*re.findall(r'^  "?([\w@/]+)"?: \{', table, re.MULTILINE)}
    documented = (ROOT / "docs/metrics.md").read_text()
    assert len(names) > 30 and not {name for name in names if f"`{name}`" not in documented}


# --- The commands ---------------------------------------------------------------------------------


def test_the_command_prints_the_address_and_serves_until_ctrl_c(tmp_path):
    write_lines(tmp_path / "run/metrics.jsonl", {"step": 1})
    command = [sys.executable, "-m", "verifiers_rl.cli.rl", "view", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        (address,) = re.findall(r"1 run: (http://127\.0\.0\.1:\d+/\?token=\S+)", line)
        assert httpx.get(address, trust_env=False).status_code == 200
        assert httpx.get(address.partition("?")[0], trust_env=False).status_code == 403
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and errors == "", errors
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("nowhere", "nowhere: no such folder; give the folder of a run"),
        ("file", "file: is a file"),
        (". --port 99999", "cannot listen on port 99999"),
        ("empty -o page.html", "there is no run in these folders"),
        ("run -o no/page.html", "no/page.html: No such file or directory"),
    ],
)
def test_what_a_command_cannot_do_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "run/metrics.jsonl", {"step": 1})
    with pytest.raises(SystemExit) as ended:
        command.main(arguments.split())
    errors = capsys.readouterr().err
    assert ended.value.code == 1 and message in errors and errors.count("\n") == 1


def test_a_missing_server_library_is_an_error_that_says_what_to_install(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.delitem(sys.modules, "verifiers_rl.view.server")
    monkeypatch.delattr("verifiers_rl.view.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    write_lines(tmp_path / "metrics.jsonl", {"step": 1})
    with pytest.raises(SystemExit):
        command.main([str(tmp_path)])
    assert "uv pip install 'verifiers-rl[view]'" in capsys.readouterr().err
    assert command.main([str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 50_000


def test_the_modules_of_the_page_can_be_put_together():
    whole = one_file.bundle("main.js")
    assert not re.search(r"^(import|export)\b", whole, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", whole, re.MULTILINE)
    assert len(names) == len({*names}) > 100
    for path in one_file.STATIC.glob("*.[cj]s*"):
        assert not re.search("</(script|style)", path.read_text("utf-8"), re.IGNORECASE), path
