"""Where the server ends, its proxies do, whether they are just being started or have just ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from aegis.launcher.proxy_supervisor import ProxySupervisor


class Process:
    """Runs until it is killed."""

    pid = 1

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self.killed = False

    def kill(self) -> None:
        if self._ended.is_set():
            raise ProcessLookupError
        self.killed = True
        self._ended.set()

    def end(self) -> None:
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return -9


def supervising(proxies: int, node: SimpleNamespace) -> ProxySupervisor:
    names, market = [f"proxy-{n}" for n in range(1, 1 + proxies)], SimpleNamespace(node=node)
    return ProxySupervisor(names, cast(Any, None), cast(Any, market), None, cast(Any, None))


def test_where_the_server_ends_while_they_start_no_more_are_started_and_the_last_one_is_ended() -> None:
    """Each start holds up the loop, which would hear of a signal after all of them only."""
    started: list[Process] = []

    async def main() -> None:
        node = SimpleNamespace(proxies=SimpleNamespace(), draining=False)
        supervisor = supervising(63, node)

        async def spawn(place: Any) -> Process:
            started.append(Process())
            if len(started) == 3:
                closing.set()
            await asyncio.sleep(0)
            place.process = started[-1]
            return started[-1]

        supervisor._spawn = spawn  # type: ignore[assignment, method-assign]
        closing = asyncio.Event()
        supervisor.start()
        await closing.wait()
        node.draining = True
        async with asyncio.timeout(5):
            await supervisor.close(60.0)

    asyncio.run(main())
    assert len(started) == 3 and all(process.killed for process in started)


def test_one_that_has_just_ended_where_the_server_ends_is_no_matter() -> None:
    """A signal to all processes ends both, in any order."""

    async def main() -> None:
        supervisor = supervising(1, SimpleNamespace(proxies=SimpleNamespace(), draining=False))
        process = Process()

        async def spawn(place: Any) -> Process:
            place.process = process
            return process

        supervisor._spawn = spawn  # type: ignore[assignment, method-assign]
        supervisor.start()
        while not supervisor._places["proxy-1"].process:
            await asyncio.sleep(0)
        process.end()
        async with asyncio.timeout(5):
            await supervisor.close(60.0)

    asyncio.run(main())
