"""Tasks that code of a user cannot end the loop with."""

import asyncio
import gc
from functools import partial

import pytest

from tests.helpers import run_python
from verifiers_rl.process.loop_thread import (
    LoopThread,
    contain_tasks,
    gather_or_cancel,
    run_contained,
)


@pytest.fixture
def run():
    """Runs a coroutine in a loop of contained tasks, to its end. Warnings are errors."""

    def run(coroutine):
        loop = asyncio.new_event_loop()
        contain_tasks(loop)
        result = loop.run_until_complete(coroutine)
        loop.close()
        gc.collect()
        return result

    return run


def test_a_task_that_its_loop_left_behind_is_closed_without_another_error(run, caplog):
    closed = []

    async def wait():
        try:
            await asyncio.sleep(60)
        finally:
            closed.append("waiting")

    async def begin():
        asyncio.get_running_loop().create_task(wait())
        await asyncio.sleep(0)

    run(begin())
    assert closed == ["waiting"]
    assert caplog.text.count("Task was destroyed but it is pending!") == 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_cancelled_task_is_cancelled_and_its_coroutine_has_an_end(run, has_begun):
    async def cancel():
        task = asyncio.create_task(asyncio.sleep(60))
        if has_begun:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert run(cancel())


def test_a_function_that_never_returns_does_not_keep_the_process_from_ending():
    code = """
import asyncio, threading
from verifiers_rl.process.loop_thread import call_on_thread

async def main():
    assert await call_on_thread(lambda: 7) == 7
    await asyncio.wait_for(call_on_thread(threading.Event().wait), 0.1)

try:
    asyncio.run(main())
except TimeoutError:
    print("the deadline")
"""
    assert run_python("-c", code).stdout == "the deadline\n"


def test_the_child_of_a_fork_ends_with_its_task_whatever_its_code_does():
    """Most code ends a child by `sys.exit()`, which a task contains."""
    code = """
import asyncio, os, sys
from verifiers_rl.process.loop_thread import contain_tasks, run_contained

async def fork(how):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    match how:
        case "exits": sys.exit()
        case "fails": sys.exit(3)
        case "explains": sys.exit("why")
        case "raises": raise ValueError
        case "waits": await asyncio.sleep(0)
    return 0

async def main():
    contain_tasks(asyncio.get_running_loop())
    for how in ("exits", "fails", "explains", "raises", "waits", "returns"):
        print(how, await run_contained(fork(how)), flush=True)

asyncio.run(main())
"""
    ended = run_python("-c", code)
    said = ended.stdout.splitlines()
    assert said == ["exits 0", "fails 3", "explains 1", "raises 1", "waits 1", "returns 1"]
    assert "why\n" in ended.stderr


def test_code_that_stops_its_loop_costs_its_task_only():
    async def stop():
        asyncio.get_running_loop().stop()

    thread = LoopThread("rollouts")
    with pytest.raises(RuntimeError, match="stops the event loop that it runs in"):
        thread.run(run_contained(stop())).result(10)
    assert thread.run(asyncio.sleep(0, "goes on")).result(10) == "goes on"
    thread.stop(partial(asyncio.sleep, 0))
    assert not thread.thread.is_alive()


def test_a_task_that_cancels_itself_is_not_warned_of(run, caplog):
    """As aiohttp's server ends the task of a closed connection."""

    async def cancels_itself():
        raise asyncio.CancelledError

    async def forget_it():
        await asyncio.wait([asyncio.get_running_loop().create_task(cancels_itself())])

    run(forget_it())
    assert not caplog.records


def test_what_is_cancelled_together_ends_each_in_its_own_time():
    ended = []

    async def work(seconds):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(seconds)  # as an environment that cleans up
            ended.append(seconds)

    async def run():
        together = asyncio.create_task(gather_or_cancel([work(0.0), work(0.2)]))
        await asyncio.sleep(0)  # it begins
        await asyncio.sleep(0)  # and so do they
        together.cancel()
        with pytest.raises(asyncio.CancelledError):
            await together

    asyncio.run(run())
    assert ended == [0.0, 0.2]
    assert asyncio.run(gather_or_cancel([])) == []
