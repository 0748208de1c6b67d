"""Tasks that code of a user cannot end the loop with."""

import asyncio
import gc

import pytest

from verifiers_rl.process.loop_thread import contain_tasks


def test_a_task_that_its_loop_left_behind_is_closed_without_another_error(caplog):
    closed = []

    async def wait():
        try:
            await asyncio.sleep(60)
        finally:
            closed.append("waiting")

    async def begin():
        for coroutine in (wait(), wait()):
            asyncio.get_running_loop().create_task(coroutine)
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    contain_tasks(loop)
    loop.run_until_complete(begin())
    loop.close()
    gc.collect()  # warnings are errors
    assert closed == ["waiting"] * 2
    assert caplog.text.count("Task was destroyed but it is pending!") == 2


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_cancelled_task_is_cancelled_and_its_coroutine_has_an_end(has_begun):
    seen = []

    async def wait():
        seen.append("begun")
        await asyncio.sleep(60)

    async def run():
        task = asyncio.create_task(wait())
        if has_begun:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    loop = asyncio.new_event_loop()
    contain_tasks(loop)
    assert loop.run_until_complete(run())
    loop.close()
    gc.collect()
    assert seen == ["begun"] * has_begun


def test_a_task_that_cancels_itself_is_not_warned_of(caplog):
    """As aiohttp's server ends the task of a closed connection."""

    async def cancels_itself():
        waiter = asyncio.get_running_loop().create_future()
        waiter.cancel()
        await waiter

    async def forget_it():
        await asyncio.wait([asyncio.get_running_loop().create_task(cancels_itself())])

    loop = asyncio.new_event_loop()
    contain_tasks(loop)
    loop.run_until_complete(forget_it())
    loop.close()
    gc.collect()
    assert not caplog.records
