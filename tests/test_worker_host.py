"""Rollout workers of another machine, which here is loopback and a `WorkerHost` of this process."""

import asyncio
import errno
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from tests.conftest import free_port
from tests.helpers import ROOT, load_example, make_tiny_model, serving
from tests.machines import machines
from tests.test_env_workers import at, ends_soon, is_running
from tests.test_environments_v1 import Server
from tests.troubled_env import TroubledEnv
from verifiers_rl import RLConfig
from verifiers_rl.cli import env_workers
from verifiers_rl.envs import worker_host, workers
from verifiers_rl.envs.base import InvalidEnvironmentError
from verifiers_rl.envs.make import make_runner
from verifiers_rl.envs.messages import EnvWorkerError
from verifiers_rl.envs.worker_host import WorkerHost
from verifiers_rl.envs.workers import (
    WorkerEnvironment,
    WorkerLostError,
    WorkerPool,
    secret_of_workers,
)
from verifiers_rl.inference.client import TOKEN_VARIABLE
from verifiers_rl.process import connections
from verifiers_rl.types import Slots


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "of this run")
    monkeypatch.setattr(worker_host, "AGAIN_S", 0.05)


@contextmanager
def hosting(port, setup, token="of this run"):
    """One worker of another machine. `host.errors` has what ended it."""
    host = WorkerHost(("127.0.0.1", port), secret_of_workers(token), setup)
    host.errors = []

    def run():
        try:
            host.run(1)
        except EnvWorkerError as error:
            host.errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield host
    finally:
        host.close()
        thread.join(20)


async def until(is_done, seconds=30):
    async with asyncio.timeout(seconds):
        while not is_done():
            await asyncio.sleep(0.02)


def roll_out(tmp_path, use, timeout_s=60.0):
    """What `use(run, pool, host)` returns, with one worker here and one on another machine. Two
    groups that begin together go to one each, the first to the worker here.
    """

    async def main():
        port = free_port()
        pool = WorkerPool(1, 64, timeout_s, ("127.0.0.1", port))
        env, slots = WorkerEnvironment(TroubledEnv(tmp_path), pool), Slots(64)

        async def run(question):
            return await env.run_group("train", at[question], 2, "m", {}, 9, slots)

        with hosting(port, pool.setup()) as host:  # which comes before the trainer waits for it
            try:
                await env.open()
                await until(lambda: len(pool.workers) == 2)
                return await use(run, pool, host)
            finally:
                await env.close()

    return asyncio.run(asyncio.wait_for(main(), 90))


def pid_elsewhere(host):
    return host._running[0][1].pid


def test_groups_run_in_a_worker_of_another_machine_as_in_one_here(tmp_path, capfd):
    async def use(run, pool, host):
        own = pool.workers[0]._process.pid, pid_elsewhere(host)
        return own, await asyncio.gather(run("sleep"), run("raise"), run("be well"), run("sleep"))

    own, (first, raised, well, last) = roll_out(tmp_path, use)
    assert {r.metrics["pid"] for r in (*first, *well)} == {own[0]}
    assert {r.metrics["pid"] for r in (*raised, *last)} == {own[1]}
    assert (
        "no answer key" in str(raised[0].error) and "troubled_env" in raised[0].error.__notes__[0]
    )
    for rollout in (*first, *well, *last):
        assert (rollout.error, rollout.reward, rollout.num_restarts) == (None, 3.0, 0)
        assert rollout.samples[0].token_ids.tolist() == [1, 2]
        assert rollout.samples[0].policy_versions.tolist() == [-1, 9]
    assert "rollout worker 0 on 127.0.0.1 has joined, one of 2" in capfd.readouterr().out
    assert not any(map(is_running, own))


def test_groups_of_a_lost_machine_begin_again_here_and_it_may_come_back(tmp_path, caplog):
    async def use(run, pool, host):
        groups = asyncio.gather(run("sleep"), run("sleep"))
        await asyncio.sleep(0.05)
        here, lost = pool.workers[0]._process.pid, pid_elsewhere(host)
        os.kill(lost, signal.SIGKILL)
        found = await groups
        await until(lambda: len(pool.workers) == 2)  # it is started again, and has joined
        again = await asyncio.gather(run("sleep"), run("sleep"))
        return here, lost, found, again

    here, lost, (first, second), (_, again) = roll_out(tmp_path, use)
    assert [(r.error, r.num_restarts, r.metrics["pid"]) for r in first] == [(None, 0, here)] * 2
    assert [(r.error, r.num_restarts, r.metrics["pid"]) for r in second] == [(None, 1, here)] * 2
    assert again[0].metrics["pid"] not in (here, lost) and again[0].num_restarts == 0
    assert "worker 0 on 127.0.0.1 is lost: its connection has ended; its 1 groups" in caplog.text


def test_a_stopped_worker_elsewhere_is_ended_and_its_groups_begin_again(
    tmp_path, monkeypatch, caplog
):
    for name, seconds in (("ALIVE_S", 0.2), ("BLOCKED_S", 1.0), ("EXIT_S", 0.2)):
        monkeypatch.setattr(workers, name, seconds)

    async def use(run, pool, host):
        groups = asyncio.gather(run("sleep"), run("sleep"))
        await asyncio.sleep(0.05)
        stopped = pid_elsewhere(host)
        os.kill(stopped, signal.SIGSTOP)
        found = await groups
        assert await asyncio.to_thread(ends_soon, stopped)
        return found

    _, group = roll_out(tmp_path, use, timeout_s=2.0)
    assert [(rollout.error, rollout.num_restarts) for rollout in group] == [(None, 1)] * 2
    assert "worker 0 on 127.0.0.1 has not answered for 1 s" in caplog.text


def test_what_an_environment_elsewhere_has_started_ends_with_its_worker(tmp_path):
    async def use(run, pool, host):
        _, group = await asyncio.gather(run("be well"), run("fork"))
        assert is_running(int((tmp_path / "forked").read_text()))
        return group

    group = roll_out(tmp_path, use)
    assert [rollout.error for rollout in group] == [None, None]
    assert ends_soon(int((tmp_path / "forked").read_text()))


def test_a_host_with_another_token_is_refused(tmp_path):
    async def main():
        port = free_port()
        pool = WorkerPool(1, 64, 60.0, ("127.0.0.1", port))
        env = WorkerEnvironment(TroubledEnv(tmp_path), pool)
        await env.open()
        try:
            with hosting(port, pool.setup(), token="of another run") as host:
                await until(lambda: host.errors)
                assert len(pool.workers) == 1 and not host._running
                return host.errors
        finally:
            await env.close()

    (error,) = asyncio.run(main())
    assert not isinstance(error, WorkerLostError)
    assert "has another token, or another program listens there" in str(error)


async def errors_of_host(tmp_path, setup):
    """What ends a host with this setup, whose worker the pool here does not use."""
    port = free_port()
    pool = WorkerPool(1, 64, 60.0, ("127.0.0.1", port))
    env = WorkerEnvironment(TroubledEnv(tmp_path), pool)
    await env.open()
    try:
        with hosting(port, setup) as host:
            await until(lambda: host.errors)
            assert len(pool.workers) == 1
            return host.errors
    finally:
        await env.close()


def test_a_host_whose_workers_cannot_make_the_environment_gives_up_at_once(tmp_path, caplog):
    elsewhere = WorkerPool(1, 64, 60.0)
    WorkerEnvironment(TroubledEnv(tmp_path, makers=os.getpid()), elsewhere)
    (error,) = asyncio.run(errors_of_host(tmp_path, elsewhere.setup()))
    assert not isinstance(error, WorkerLostError)  # so the run ends at its start
    assert "worker 0 could not make the environments" in str(error)
    assert "is not used: ValueError: a file of the worker is missing" in caplog.text


def test_a_worker_that_has_made_other_environments_is_not_used(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(worker_host, "MAX_DEATHS", 1)
    elsewhere = WorkerPool(1, 64, 60.0)
    env = TroubledEnv(tmp_path)
    env.name = "another"
    WorkerEnvironment(env, elsewhere)
    asyncio.run(errors_of_host(tmp_path, elsewhere.setup()))
    assert "is not used: it has made another, not env; start the same configuration" in caplog.text


def test_a_trainer_that_is_not_reached_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker_host, "PATIENCE_S", 0.2)
    pool = WorkerPool(1, 64, 60.0)
    WorkerEnvironment(TroubledEnv(tmp_path), pool)
    port, said = free_port(), []

    async def main():
        def hears():
            said.append(capsys.readouterr().out)
            return "does not reach the trainer" in said[-1]

        with hosting(port, pool.setup()):
            await until(hears)
            await asyncio.sleep(0.5)

    asyncio.run(main())
    text = "".join([*said, capsys.readouterr().out])
    assert text.count(f"does not reach the trainer at 127.0.0.1:{port} (") == 1
    assert "Does a firewall stop it? The port is MASTER_PORT + 2" in text


def test_a_group_whose_machine_is_lost_begins_again_on_another_one():
    asked = []

    class Fake:
        answers = True

        def __init__(self, machine, num_groups):
            self.machine, self.num_groups = machine, num_groups

        async def run_group(self, request, on_rollout_end):
            asked.append((self.machine, self.num_groups))
            if self.machine == "b":
                raise WorkerLostError("lost")
            return []

    pool = WorkerPool(1, 64, 60.0)
    pool.workers = [Fake("b", 0), Fake("b", 1), Fake("", 2)]
    assert asyncio.run(pool.run_group({}, lambda: None)) == ([], 1)
    assert asked == [("b", 0), ("", 2)]


def test_a_door_stays_open_when_a_connection_cannot_be_accepted(monkeypatch):
    monkeypatch.setattr(connections, "AGAIN_S", 0.01)
    accept, failed = socket.socket.accept, threading.Event()

    def fail_once(listener):
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    port, guests = free_port(), queue.SimpleQueue()
    door = connections.Door("127.0.0.1", port, "s", lambda number, guest: guests.put(guest))
    try:
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connections.check_trainer(connection, 3, "s")
            guests.get(timeout=10).close()
        assert failed.is_set()
    finally:
        door.close()


def test_a_host_whose_workers_only_die_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_host, "MAX_DEATHS", 2)

    async def use(run, pool, host):
        for _ in range(2):
            await until(lambda: 0 in host._running and len(pool.workers) == 2)
            os.kill(pid_elsewhere(host), signal.SIGKILL)
            await until(lambda: len(pool.workers) == 1)
        await until(lambda: host.errors)
        return host.errors

    (error,) = roll_out(tmp_path, use)
    assert isinstance(error, WorkerLostError)  # so the run goes on without them
    said = "rollout worker 0 ended 2 times within 60 s of its start, at last with status -9"
    assert said in str(error)


def test_workers_elsewhere_need_the_runs_token_and_a_free_port(tmp_path, monkeypatch):
    def open_at(address):
        env = WorkerEnvironment(TroubledEnv(tmp_path), WorkerPool(1, 64, 60.0, address))
        asyncio.run(env.open())

    with pytest.raises(InvalidEnvironmentError, match=r"connect to 192.0.2.1:80: .*MASTER_PORT"):
        open_at(("192.0.2.1", 80))
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(InvalidEnvironmentError, match=f"run's token: set {TOKEN_VARIABLE} to the"):
        open_at(("127.0.0.1", free_port()))


def test_a_group_that_comes_while_a_dead_worker_is_cleared_away_waits_for_the_next(
    tmp_path, monkeypatch, caplog
):
    end = workers.end_worker

    async def use(run, pool, host):
        host.close()
        await until(lambda: len(pool.workers) == 1)
        caplog.clear()
        died = asyncio.create_task(run("die once"))
        await until(lambda: "begin again" in caplog.text)
        late = await asyncio.wait_for(run("be well"), 30)
        return await died, late

    def end_slowly(process):
        process.wait()
        threading.Event().wait(0.3)
        return end(process)

    monkeypatch.setattr(workers, "end_worker", end_slowly)
    for group in roll_out(tmp_path, use):
        assert [rollout.error for rollout in group] == [None, None]


# --- From the configuration -----------------------------------------------------------------------


TASKSET = """
import verifiers.v1 as vf

__all__ = ["Letters"]

class Letters(vf.Taskset[vf.Task[vf.TaskData, vf.State, vf.TaskConfig], vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(idx=0, prompt="three letters"), self.config.task)
"""


def write_toml(folder, port=1, workers="1"):
    """An environment, a model and a TOML."""
    (folder / "letters.py").write_text(TASKSET)
    make_tiny_model().save_pretrained(folder / "model")
    tokenizer = load_example("warm_start").make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    (folder / "rl.toml").write_text(
        'model = "./model"\n[env.taskset]\nid = "letters"\n[env.harness]\nid = "null"\n'
        "[trainer]\ngpus = 0\n[trainer.args]\nmax_seq_len = 128\nmax_tokens = 16\n"
        f'vllm_server_port = {port}\nenv_workers = {workers}\noutput_dir = "{folder}/run"\n'
    )
    return folder / "rl.toml", tokenizer


def test_the_workers_of_a_toml_run_its_environment_for_a_trainer_elsewhere(tmp_path, monkeypatch):
    async def main(server):
        async with serving(server.answer, "/v1/chat/completions/tokens") as url:
            path, tokenizer = write_toml(tmp_path, port=int(url.rpartition(":")[2]))
            server.tokenizer = tokenizer
            port, slots = free_port(), Slots(8)
            monkeypatch.syspath_prepend(str(tmp_path))
            args = RLConfig(output_dir=str(tmp_path / "run"), use_cpu=True, env_workers=1,
                            max_seq_len=128, max_tokens=16)  # fmt: skip
            pool = WorkerPool(0, 64, 60.0, ("127.0.0.1", port))  # none here
            table = env_workers_config(path).load_envs()
            runner = make_runner(table, "http://unused", tokenizer, args, pool=pool)
            await runner.open()
            command = [sys.executable, "-m", "verifiers_rl.cli.env_workers", f"127.0.0.1:{port}"]
            host = subprocess.Popen([*command, "@", str(path)], cwd=tmp_path)
            try:
                await until(lambda: pool.workers or host.poll() is not None, 80)
                sampling = args.sampling_args()
                group = await runner.run_group("train", 0, 2, "m", sampling, 0, slots)
            finally:
                await runner.close()
                host.terminate()
                assert await asyncio.to_thread(host.wait, 30) == 0
            return group

    server = Server(None, lambda prompt: "abc")
    for rollout in asyncio.run(asyncio.wait_for(main(server), 90)):
        assert rollout.error is None, rollout.error
        assert rollout.completion == "abc" and rollout.samples[0].num_loss_tokens > 0
    assert len(server.requests) == 2


def env_workers_config(path):
    from verifiers_rl.cli.config import load_run_config

    return load_run_config(path)


def test_an_environment_that_workers_elsewhere_cannot_make_is_one_line_and_status_1(
    tmp_path, monkeypatch, capsys
):
    path, _ = write_toml(tmp_path)
    (tmp_path / "letters.py").write_text("import missing_here\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["env_workers", "127.0.0.1:1", "@", str(path)])
    sys.modules.pop("letters", None)
    with pytest.raises(SystemExit) as ended:
        env_workers.main()
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 1 and "vf-rl: error:" in said and "missing_here" in said


def test_each_machine_has_as_many_workers_as_the_toml_says(tmp_path, monkeypatch):
    path, _ = write_toml(tmp_path, workers="3")
    monkeypatch.setattr(sys, "path", list(sys.path))
    setup, number = env_workers.prepare(["@", str(path), "--trainer.args.max_concurrent", "5"])
    assert number == 3
    size = int.from_bytes(setup[:8], "little")
    assert json.loads(setup[8 : 8 + size])["max_concurrent"] == 5
    ((name, _),) = pickle.loads(setup[16 + size :])
    assert name == "env"


# --- Machines -------------------------------------------------------------------------------------

BOTH = """
import asyncio, sys
from pathlib import Path
from tests.troubled_env import TroubledEnv
from verifiers_rl.envs.worker_host import WorkerHost
from verifiers_rl.envs.workers import WorkerEnvironment, WorkerPool, secret_of_workers
from verifiers_rl.process import connections
from verifiers_rl.types import Slots

connections.KEEPALIVE = (1, 1, 1)
address = (sys.argv[1], 29502)
pool = WorkerPool(1, 64, 60.0, address)
env = WorkerEnvironment(TroubledEnv(Path(sys.argv[2])), pool)
"""
TRAINER = f"""{BOTH}
async def until_workers(number):
    while len(pool.workers) != number:
        await asyncio.sleep(0.05)
    print("workers:", number, "groups:", [one.num_groups for one in pool.workers], flush=True)

async def main():
    await env.open()
    await until_workers(2)
    groups = [env.run_group("train", {at["wait"]}, 2, "m", {{}}, 9, Slots(64)) for _ in range(2)]
    groups = [asyncio.create_task(group) for group in groups]
    await asyncio.sleep(0.5)
    for number in (2, 1, 2):
        await until_workers(number)
    for group in groups:
        group.cancel()
    await env.close()

asyncio.run(main())
"""
HOST = f"""{BOTH}
WorkerHost(address, secret_of_workers("of this run"), pool.setup()).run(1)
"""


@pytest.mark.slow
def test_groups_begin_again_when_the_link_of_a_machine_is_cut_and_it_comes_back(tmp_path):
    log = tmp_path / "log"

    def wait_for(text):
        deadline = time.monotonic() + 60
        while text not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    with machines(2) as found, log.open("wb") as output:
        processes = [
            subprocess.Popen(
                [*one.words, sys.executable, "-c", script, found[0].address, str(tmp_path)],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
            )
            for one, script in zip(found, (TRAINER, HOST), strict=True)
        ]  # fmt: skip
        try:
            wait_for("workers: 2 groups: [1, 1]")
            found[1].set_link("down")
            wait_for("workers: 1 groups: [2]")
            assert "its 1 groups begin again in other workers" in log.read_text()
            found[1].set_link("up")
            wait_for("workers: 2 groups: [2, 0]")
            assert processes[0].wait(30) == 0
        finally:
            for process in processes:
                process.kill()
                process.wait()
