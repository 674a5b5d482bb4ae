"""Answers to `/metrics`, which anybody may ask for, shared: one is made at a time, and few of them in a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PERIOD_S = 0.1
"""Between the beginnings of two computations. One takes some milliseconds of each process of the server."""


class Scrapes:
    """No answer is older than its question: one that is being computed already is not for those who ask meanwhile."""

    def __init__(self, *, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._turn = asyncio.Lock()
        self._begun_s = -period_s
        self._next: asyncio.Task[bytes] | None = None

    async def answer(self, compute: Callable[[], Awaitable[bytes]]) -> bytes:
        """What the next computation gives to all who wait for it."""
        if self._next is None:
            self._next = asyncio.create_task(self._compute(compute))
        return await asyncio.shield(self._next)

    async def _compute(self, compute: Callable[[], Awaitable[bytes]]) -> bytes:
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(max(self._begun_s + self._period_s - loop.time(), 0.0))
            self._begun_s, self._next = loop.time(), None
            return await compute()
