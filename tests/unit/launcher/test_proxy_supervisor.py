"""A proxy that hangs is found in time, a busy one never is, and none is when the watcher itself stood still."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from aegis.core.clock import NS_PER_S
from aegis.core.ids import ProxyId
from aegis.launcher.proxy_supervisor import BUSY_NS, LOOK_NS, SILENT_NS, STARTING_NS, HangDetector, ProxySupervisor

A, B = ProxyId(1), ProxyId(2)


class Watched:
    """A watcher that looks as often as it should."""

    def __init__(self) -> None:
        self.detector = HangDetector()
        self.now_ns = 7 * NS_PER_S
        self.used_ns = {A: 0, B: 0}
        self.detector.check(self.used_ns, self.now_ns)
        for proxy in (A, B):
            self.detector.saw_message(proxy, self.now_ns)

    def pass_ns(
        self, time_ns: int, *, speaking: ProxyId | None = None, working: ProxyId | None = None
    ) -> list[ProxyId]:
        """Who was found to hang meanwhile, first to last."""
        found: list[ProxyId] = []
        for _ in range(time_ns // LOOK_NS):
            self.now_ns += LOOK_NS
            if speaking:
                self.detector.saw_message(speaking, self.now_ns)
            if working:
                self.used_ns[working] += 1
            found += self.detector.check(self.used_ns, self.now_ns)
        return found


def test_who_says_nothing_and_does_nothing_hangs() -> None:
    watched = Watched()
    assert watched.pass_ns(SILENT_NS - LOOK_NS, speaking=A) == []
    assert watched.pass_ns(LOOK_NS, speaking=A) == [B]


def test_who_works_is_busy_for_a_minute() -> None:
    watched = Watched()
    assert watched.pass_ns(BUSY_NS - LOOK_NS, speaking=A, working=B) == []
    assert watched.pass_ns(LOOK_NS, speaking=A, working=B) == [B]


def test_who_has_not_joined_yet_has_longer() -> None:
    watched = Watched()
    watched.detector.forget(B)
    watched.detector.started(B, watched.now_ns)
    assert watched.pass_ns(2 * BUSY_NS, speaking=A, working=B) == [], "it imports what it needs"
    assert watched.pass_ns(STARTING_NS - LOOK_NS, speaking=A) == []
    assert watched.pass_ns(LOOK_NS, speaking=A) == [B]
    watched.detector.saw_message(B, watched.now_ns)
    assert watched.pass_ns(SILENT_NS, speaking=A) == [B]


def test_who_has_left_is_not_found() -> None:
    watched = Watched()
    watched.detector.forget(B)
    assert watched.pass_ns(BUSY_NS, speaking=A) == []


def test_time_in_which_the_watcher_stood_still_is_nobodys() -> None:
    watched = Watched()
    watched.now_ns += BUSY_NS
    assert watched.detector.check(watched.used_ns, watched.now_ns) == []
    assert watched.pass_ns(SILENT_NS - LOOK_NS) == []
    assert watched.pass_ns(LOOK_NS) == [A, B]


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
