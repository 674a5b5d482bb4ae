"""Comments into event streams that say nothing, and the end of those that nobody reads: one timer for all of a proxy.

Timers of their own would go off between the steps of nearly every other request where there are thousands of streams.
What is due within a tick is done together, and most requests pass between two ticks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from heapq import heappop, heappush
from itertools import count

TICK_S = 0.05


class IdleStream:
    """One stream's: `since_s` it has said nothing, and `unread` of its events wait for the connection to take them.

    `speak` emits a comment, `cut` ends the connection."""

    __slots__ = ("_cut", "_speak", "_speaking", "since_s", "unread")

    def __init__(self, now_s: float, speak: Callable[[], Awaitable[None]], cut: Callable[[], None]) -> None:
        self.since_s = now_s
        self.unread = 0
        self._speak: Callable[[], Awaitable[None]] | None = speak
        self._cut: Callable[[], None] | None = cut
        self._speaking: asyncio.Future[None] | None = None

    def end(self) -> None:
        """The stream is over: nothing of it is held any more, though it is still to be looked at."""
        if self._speaking:
            self._speaking.cancel()
        self._speak = self._cut = self._speaking = None

    def look(self, now_s: float, keep_alive_s: float, reader_timeout_s: float) -> float | None:
        """Does what is due; when to look again, None: never."""
        if self._speak is None or self._cut is None:
            return None
        bound_s = reader_timeout_s if self.unread else keep_alive_s
        left_s = self.since_s + bound_s - now_s
        if left_s > 0:
            return now_s + min(left_s, keep_alive_s)
        if self.unread:
            self._cut()
            return None
        self._speaking = asyncio.ensure_future(self._speak())
        return now_s + keep_alive_s


class KeepAlive:
    """`keep_alive_s` is the longest that a stream is silent, but for a tick; who reads nothing for `reader_timeout_s`
    is cut off."""

    def __init__(self, keep_alive_s: float, reader_timeout_s: float) -> None:
        self._keep_alive_s = keep_alive_s
        self._reader_timeout_s = reader_timeout_s
        self._tick_s = min(TICK_S, keep_alive_s)
        self._numbers = count()
        self._due: list[tuple[float, int, IdleStream]] = []
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, speak: Callable[[], Awaitable[None]], cut: Callable[[], None]) -> IdleStream:
        """A stream that has begun."""
        now_s = asyncio.get_running_loop().time()
        idle = IdleStream(now_s, speak, cut)
        self._look_at(idle, now_s + self._keep_alive_s)
        return idle

    def _look_at(self, idle: IdleStream, at_s: float) -> None:
        heappush(self._due, (at_s, next(self._numbers), idle))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._due and self._due[0][0] <= now_s:
            idle = heappop(self._due)[-1]
            again_s = idle.look(now_s, self._keep_alive_s, self._reader_timeout_s)
            if again_s is not None:
                self._look_at(idle, again_s)
        if self._due and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
