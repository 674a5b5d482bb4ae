"""Comments in silent streams, and clients that are cut off; the test sets the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from proxy.http.streaming.keep_alive import IdleStream, KeepAlive

WAIT_S = 60
KEEP_S, READER_S = 5.0, 60.0


class Stream:
    """Began at 0. `gate` holds up what it says."""

    def __init__(self) -> None:
        self.said = 0
        self.cut = 0
        self.gate: asyncio.Event | None = None
        self.idle = IdleStream(0.0, self._speak, self._cut_off)

    async def _speak(self) -> None:
        self.said += 1
        if self.gate:
            await self.gate.wait()

    def _cut_off(self) -> None:
        self.cut += 1

    async def look(self, now_s: float) -> float | None:
        again_s = self.idle.look(now_s, KEEP_S, READER_S)
        await asyncio.sleep(0)
        return again_s


def with_stream(script: Callable[[Stream], Any]) -> None:
    async def main() -> None:
        await script(Stream())

    asyncio.run(main())


def test_a_stream_is_silent_for_so_long_and_no_longer() -> None:
    async def script(stream: Stream) -> None:
        assert await stream.look(4.0) == 5.0 and not stream.said
        stream.idle.since_s = 4.5
        assert await stream.look(5.0) == 9.5 and not stream.said, "it has said something meanwhile"
        assert await stream.look(9.5) == 14.5 and stream.said == 1

    with_stream(script)


def test_who_reads_nothing_is_told_nothing_and_cut_off_in_the_end() -> None:
    async def script(stream: Stream) -> None:
        stream.idle.unread = 1
        assert await stream.look(5.0) == 10.0, "it may begin to read"
        assert await stream.look(58.0) == 60.0
        assert (stream.said, stream.cut) == (0, 0)
        assert await stream.look(60.0) is None
        assert (stream.said, stream.cut) == (0, 1)

    with_stream(script)


def test_a_stream_that_is_over_is_left_alone_and_says_nothing_more() -> None:
    async def script(stream: Stream) -> None:
        stream.gate = asyncio.Event()
        await stream.look(5.0)
        speaking = stream.idle._speaking
        stream.idle.end()
        assert await stream.look(100.0) is None
        assert speaking and speaking.cancelled() and (stream.said, stream.cut) == (1, 0)

    with_stream(script)


class CountingLoop(asyncio.SelectorEventLoop):
    """How many timers were set."""

    timers = 0

    def call_later(self, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_later(*arguments, **options)


def test_many_streams_share_one_timer() -> None:
    count = 200
    loop = CountingLoop()

    async def main() -> None:
        keep_alive, silent, over = KeepAlive(0.01, READER_S), set(range(count)), asyncio.Event()

        async def speak(number: int) -> None:
            silent.discard(number)
            if not silent:
                over.set()

        idle_streams = [keep_alive.watch(lambda number=number: speak(number), lambda: None) for number in range(count)]
        async with asyncio.timeout(WAIT_S):
            await over.wait()
        for idle in idle_streams:
            idle.end()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    assert loop.timers < count / 4
