from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from proxy.http.client_disconnect import ClientGone, while_connected


class Connection:
    """A client's: `receive` tells that it has gone once it has `left`."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


class Work:
    """Waits for `goes_on`. If it is cancelled, it needs a moment to end."""

    def __init__(self, *, ends_with: BaseException | None = None) -> None:
        self.goes_on = asyncio.Event()
        self.ended = False
        self._ends_with = ends_with

    async def run(self) -> str:
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.ended = True
            if self._ends_with is not None:
                raise self._ends_with from None
            raise
        self.ended = True
        return "done"


def running(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(5):
            await test

    asyncio.run(bounded())


async def begun(connection: Connection, work: Work) -> asyncio.Task[str]:
    task = asyncio.create_task(while_connected(connection.receive, work.run()))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def test_the_result_of_work_whose_client_stays() -> None:
    async def test() -> None:
        work = Work()
        task = await begun(Connection(), work)
        work.goes_on.set()
        assert await task == "done"
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody watches any more"

    running(test())


@pytest.mark.parametrize("ends_with", [None, ValueError("in the middle")])
def test_work_has_ended_when_its_client_is_told_gone(ends_with: BaseException | None) -> None:
    async def test() -> None:
        connection, work = Connection(), Work(ends_with=ends_with)
        task = await begun(connection, work)
        connection.left.set()
        with pytest.raises(ClientGone):
            await task
        assert work.ended
        assert not task.cancelled()
        assert not task.cancelling(), "what the task does next is not cancelled"

    running(test())


def test_who_is_cancelled_from_outside_is_cancelled() -> None:
    async def test() -> None:
        connection, work = Connection(), Work()
        task = await begun(connection, work)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.ended

    running(test())


def test_who_is_cancelled_from_outside_while_the_client_leaves_is_cancelled() -> None:
    async def test() -> None:
        connection, work = Connection(), Work()
        task = await begun(connection, work)
        connection.left.set()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.ended

    running(test())


def test_a_client_that_leaves_just_when_its_work_is_done_is_gone_or_answered_and_cancels_nothing_later() -> None:
    async def test() -> None:
        for first in ("work", "client"):
            connection, work = Connection(), Work()
            task = await begun(connection, work)
            for event in (work.goes_on, connection.left) if first == "work" else (connection.left, work.goes_on):
                event.set()
            try:
                assert await task == "done"
            except ClientGone:
                assert first == "client"
            assert not task.cancelling()

    running(test())


def test_an_error_of_work_is_told() -> None:
    async def broken() -> None:
        raise ValueError("what went wrong")

    async def test() -> None:
        with pytest.raises(ValueError, match="went wrong"):
            await while_connected(Connection().receive, broken())

    running(test())
