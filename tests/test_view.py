"""What the page about runs shows, without a browser: runs, rollouts, the server, the file."""

import base64
import hashlib
import json
import os
import re
import signal
import socket
import time
from contextlib import contextmanager
from urllib.parse import parse_qsl

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fake_run import write_fake_run
from tests.helpers import ROOT, chat, check_lines, names_of, running_python
from tests.serving import uvicorn_in_thread
from tests.test_rollouts import make_row, write_rows
from verifiers_rl.cli import rl
from verifiers_rl.report.run_folder import remove_rollouts, write_run
from verifiers_rl.view import one_file, server
from verifiers_rl.view.browse import Filter, page_of, rollout_of
from verifiers_rl.view.runs import MetricsFile, Run, Runs

HERE, GONE = socket.gethostname(), 2**22 + 1  # no process has that number


def written(folder, *rows):
    """The rollouts of a run after these were written, too."""
    write_rows(folder, *rows)
    return Run("a", folder).rollouts()


def write_lines(path, *rows, mode="a"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.writelines(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


# --- Runs -----------------------------------------------------------------------------------------


def test_runs_are_found_in_folders_and_have_names_of_their_own(tmp_path):
    write_lines(tmp_path / "b/rl/run.json", {})
    for folder in ("a/rl", "b/rl/checkpoint-3", "c/.hidden/no"):  # the second is inside a run
        write_lines(tmp_path / folder / "metrics.jsonl", {"step": 1})
    runs = Runs([tmp_path / "a/rl", tmp_path])
    assert [run.name for run in runs.find()] == ["a/rl", "b/rl"]
    write_lines(tmp_path / "b/deep/er/other/metrics.jsonl")  # it begins later
    assert [run.name for run in runs.find()] == ["a/rl", "other", "b/rl"]
    assert runs["other"].folder == tmp_path / "b/deep/er/other"


def test_new_lines_of_metrics_are_read_once_and_a_replaced_file_from_its_begin(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert metrics.refresh().num_rows == 0
    write_lines(path, {"step": 1, "loss": 0.5}, '{"step": 2, "lo')
    assert metrics.refresh().num_rows == 1  # the second line is not finished
    write_lines(path, 'ss": null, "reward": 1}\n', "oh\n", {"step": "3"}, {"step": 3})
    write_lines(path, f"{'[' * 100_000}\n")
    metrics.refresh()
    assert metrics.num_unreadable == 3 and metrics.not_finite == {"loss": (1, 2)}
    assert list(metrics.columns["step"]) == [1, 2, 3]
    # A resumed run leaves the lines up to its checkpoint, and is soon longer than before.
    aside = tmp_path / "aside"
    write_lines(aside, *({"step": n, "loss": 0.5} for n in range(1, 9)))
    aside.replace(path)
    metrics.refresh()
    assert metrics.generation == 1 and list(metrics.columns["step"]) == [*range(1, 9)]
    assert metrics.not_finite == {} and metrics.num_unreadable == 0


def test_a_run_with_odd_names_and_numbers_is_shown_beside_the_others(tmp_path):
    odd = tmp_path / os.fsdecode(b"\xff")
    write_lines(odd / "metrics.jsonl", {"step": 1}, {"step": 2, "loss": 10**400}, {"step": 3})
    write_lines(tmp_path / "b/metrics.jsonl", {"step": 1})
    runs = Runs([tmp_path])
    states = [run.state() for run in runs.find()]
    assert [(state["name"], state["step"]) for state in states] == [("b", 1), ("\\udcff", 3)]
    assert states[1]["problems"] == ["metrics.jsonl: 1 lines cannot be read"]
    assert runs["\\udcff"].metrics()["columns"] == {"step": [1, 3]}


def test_what_is_no_file_or_has_another_schema_is_said_and_the_rest_is_shown(tmp_path):
    write_rows(tmp_path, make_row(1), make_row(2))
    pq.write_table(pa.table({"step": [3]}), tmp_path / "rollouts/step-000003.parquet")
    for name in ("metrics.jsonl", "run.json", "rollouts/step-000004.parquet"):
        os.mkfifo(tmp_path / name)  # for which a reader would wait
    (tmp_path / "rollouts/step-000005.parquet").mkdir()
    run = Run("a", tmp_path)
    of_run, of_metrics, *of_rollouts = run.state()["problems"]
    assert of_metrics == f"metrics.jsonl cannot be read: {tmp_path}/metrics.jsonl is no file"
    assert of_run == f"run.json cannot be read: {tmp_path}/run.json is no file"
    for number, problem in enumerate(of_rollouts, 3):
        assert problem.startswith(f"step-00000{number}.parquet cannot be read: ")
    assert (
        "it has no column 'step', or not as this version" in of_rollouts[0]
        and len(of_rollouts) == 3
    )
    assert run.metrics()["columns"] == {} and run.ask(len) == 2


@pytest.mark.parametrize(
    "pid, host, age_s, status",
    [
        ("ours", None, 9999, "running"),
        (GONE, None, 5, "running"),  # perhaps on another machine
        (GONE, HERE, 9999, "lost"),
        (GONE, "another", 9999, "running"),
        (None, None, 0, "unknown"),
    ],
)
def test_the_status_of_a_run_is_what_its_files_and_its_process_say(
    tmp_path, pid, host, age_s, status
):
    write_lines(tmp_path / "metrics.jsonl", {"step": 4})
    pid = os.getpid() if pid == "ours" else pid
    if pid is not None:
        write_run(tmp_path, {"status": "running", "pid": pid, "host": host})
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
        make_row(3, 0.1, in_loss=False, other_branches=[chat("aside")]),
        make_row(3, 0.2, has_tokens=True, content="x" * 500),
    ]
    return written(tmp_path_factory.mktemp("chosen"), *rows)


def test_a_filter_chooses_rollouts_in_its_order(chosen_from):
    """In view_filters.txt, each query with the numbers of what it finds (=>). Rollouts without a
    reward come last; SS is not ß; a role is no text.
    """
    lines = []
    for line in (ROOT / "tests/view_filters.txt").read_text().splitlines():
        query, _, _ = line.partition(" =>")
        found = page_of(chosen_from, Filter.parse(dict(parse_qsl(query))))["rows"]
        lines.append(" ".join([query, "=>", *(str(row["number"]) for row in found)]))
    check_lines(lines, "view_filters.txt")


@pytest.mark.parametrize("wanted", ["from_step='x'", "min_reward='much'", "kind='odd'"])
def test_a_filter_that_cannot_be_is_an_error_that_names_it(wanted):
    with pytest.raises(ValueError, match=wanted):
        Filter.parse(dict(parse_qsl(wanted.replace("'", ""))))


# --- The server -----------------------------------------------------------------------------------


@contextmanager
def serving(*paths):
    """A client of the page's server, which knows the token, and the server's address."""
    runs = Runs(paths)
    runs.find()
    listener = server.listen(0)
    served = server.make_server(server.make_app(runs, "secret-token"))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with (
        listener,
        uvicorn_in_thread(served, listener),
        httpx.Client(base_url=address, timeout=20, trust_env=False) as client,
    ):
        yield client


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
    answer = client.get("/api/runs")
    assert answer.json()["runs"][0]["name"] == "one" and "secret-token" not in answer.text
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
    for name in ("../server.py", "..%2fserver.py", "vendor/LICENSE", "/etc/passwd", "vendor"):
        assert known.get(f"/static/{name}").status_code == 404, name


@pytest.mark.parametrize(
    "question, status, said",
    [
        ("rollout?run=one&number=1000000", 404, "there is no such rollout"),
        ("rollout?run=one&number=x", 400, "number='x' is no number"),
        ("metrics?run=other", 404, "there is no run 'other'; reload the page"),
        ("rollouts?run=two", 200, "{}"),  # one without rollouts
    ],
)
def test_a_question_that_has_no_answer_is_an_error_that_says_why(known, question, status, said):
    response = known.get(f"/api/{question}")
    assert response.status_code == status and said in response.text


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


# --- The page's own files -------------------------------------------------------------------------


def test_the_vendored_charts_are_what_npm_had():
    folder = server.STATIC / "vendor"
    digests = json.loads((folder / "vendored.json").read_text())["sha256"]
    assert {path.name for path in folder.iterdir()} == {*digests, "vendored.json"}
    for name, digest in digests.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


# --- The commands ---------------------------------------------------------------------------------


def test_the_command_prints_the_address_and_serves_until_ctrl_c(tmp_path):
    write_lines(tmp_path / "run/metrics.jsonl", {"step": 1})
    with running_python("-m", "verifiers_rl.cli.rl", "view", tmp_path) as process:
        line = process.stdout.readline()
        (address,) = re.findall(r"1 run: (http://127\.0\.0\.1:\d+/\?token=\S+)", line)
        assert httpx.get(address, trust_env=False).status_code == 200
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and errors == "", errors


def test_what_a_command_cannot_do_is_one_line(tmp_path, run_main):
    write_lines(tmp_path / "run/metrics.jsonl", {"step": 1})
    (tmp_path / "taken").mkdir()
    for output, said in (
        (f"{tmp_path}/run/metrics.jsonl/page.html", "exists.*; choose another -o"),
        (f"{tmp_path}/taken", "Is a directory.*; choose another -o"),
        (".", "empty name"),
    ):
        status, _, errors = run_main(rl.main, "view", tmp_path / "run", "-o", output)
        assert status == 1 and errors.count("\n") == 1
        assert re.search(f"-o {output}: .*{said}", errors)
    assert names_of(tmp_path) == ["run", "taken"]
