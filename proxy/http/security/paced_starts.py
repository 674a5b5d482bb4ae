"""Requests that begin a few at a time, so that an event loop turns soon however many come at once: it goes on with what
runs, accepts connections, and learns who has left again. Nothing is done for those who left before their turn."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable

BEGUN_AT_ONCE = 8
"""Requests that begin in one turn of the event loop. Each takes up to a millisecond of this and the next turns. With
two, a proxy answered a fifth fewer requests a second; with eight, clients that leave are noticed as soon."""


class PacedStarts:
    """Of all connections of one server, in the order in which they came."""

    __slots__ = ("_turns", "_waiting")

    def __init__(self) -> None:
        self._waiting = deque[Callable[[], bool]]()
        self._turns = False

    def begin(self, loop: AbstractEventLoop, start: Callable[[], bool]) -> None:
        """Calls `start`, in a later turn if others wait. It returns whether there was something to begin."""
        if self._turns:
            self._waiting.append(start)
            return
        self._turns = True
        loop.call_soon(self._turn, loop)
        start()

    def _turn(self, loop: AbstractEventLoop) -> None:
        left = BEGUN_AT_ONCE
        while left and self._waiting:
            left -= self._waiting.popleft()()
        self._turns = left < BEGUN_AT_ONCE
        if self._turns:
            loop.call_soon(self._turn, loop)
