"""The pace of a stream: tokens that were made ahead leave one by one, and cover the gaps between turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Generic, TypeVar

from aegis.core.model import Slo

HELD_MAX = 4096
"""Tokens that are held back; with more, the first ones leave early."""

T = TypeVar("T")


class SmoothPace(Generic[T]):
    """When the parts of one stream leave, of which most have a token.

    A token leaves when it is made, but no earlier than a TBT after the one before was to leave, or 7/5 of it while the
    tokens in hand would not cover the longest gap so far, and never later than its deadline for that. What has no token
    leaves with the one before. So (1) parts leave in order; (2) who is on time when made is on time when it leaves; (3)
    while tokens are there, two leave no more than 7/5 of a TBT apart; (4) a stream that is late is never held back; (5)
    behind a gap that was not covered there is no burst: as far as deadlines allow, what was made late stays late, and
    covers the next gap of that length; (6) no more than `HELD_MAX` tokens are held back.
    """

    __slots__ = ("_arrival_ns", "_in_hand", "_left", "_longest_ns", "_made_ns", "_next_ns", "_slo", "_waiting")

    def __init__(self, slo: Slo, arrival_ns: int) -> None:
        self._slo = slo
        self._arrival_ns = arrival_ns
        self._in_hand = 0  # tokens
        self._left = 0
        self._next_ns = 0  # when the next one may leave, if its deadline is later
        self._made_ns: int | None = None  # the last token
        self._longest_ns = slo.gap_ns  # between two that were made: even a stream that runs may pause so long
        self._waiting: deque[tuple[T, int, int]] = deque()

    def made(self, part: T, *, tokens: int, now_ns: int) -> None:
        if tokens:
            if self._made_ns is not None:
                self._longest_ns = max(self._longest_ns, now_ns - self._made_ns)
            self._made_ns = now_ns
        self._in_hand += tokens
        self._waiting.append((part, tokens, now_ns))

    def leaving(self, now_ns: int) -> list[T]:
        """The parts of the stream that leave now."""
        leaving = list[T]()
        while self._waiting and (not self._waiting[0][1] or self.next_ns <= now_ns or self._in_hand > HELD_MAX):
            part, tokens, made_ns = self._waiting.popleft()
            self._in_hand -= tokens
            if tokens:
                self._next_ns = max(self.next_ns, made_ns) + tokens * self._spacing_ns()
            self._left += tokens
            leaving.append(part)
        return leaving

    def _spacing_ns(self) -> int:
        tbt_ns = self._slo.tbt_ns
        return tbt_ns if self._in_hand * tbt_ns >= self._longest_ns else tbt_ns * 7 // 5

    @property
    def next_ns(self) -> int:
        """When the next token may leave; 0: at any time."""
        return min(self._next_ns, self._slo.due_ns(self._arrival_ns, self._left)) if self._left else 0

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def rest(self) -> list[T]:
        """All that is left, at once."""
        left = [part for part, _, _ in self._waiting]
        self._waiting.clear()
        return left


async def paced(
    parts: AsyncIterable[T], tokens: Callable[[T], int], pace: SmoothPace[T], now_ns: Callable[[], int]
) -> AsyncGenerator[T]:
    """The same parts at that pace. They are taken as they come, but for those that come while one that has left is not
    taken: then whoever makes them sees that they are not read. What `parts` raises comes behind all others at once."""
    more, taken = asyncio.Event(), asyncio.Event()
    taken.set()

    async def read() -> None:
        try:
            async for part in parts:
                pace.made(part, tokens=tokens(part), now_ns=now_ns())
                more.set()
                await taken.wait()
        finally:
            more.set()

    reading = asyncio.create_task(read())
    try:
        while True:
            more.clear()
            for part in pace.leaving(now_ns()):
                taken.clear()
                yield part
                taken.set()
            if reading.done() and (not pace.waits or reading.exception()):
                for part in pace.rest():
                    yield part
                reading.result()
                return
            wait_s = max(pace.next_ns - now_ns(), 0) / 1e9 if pace.waits else None
            if reading.done():
                await asyncio.sleep(wait_s or 0)
            elif not more.is_set():
                await _set_within(more, wait_s)
    finally:
        reading.cancel()


async def _set_within(event: asyncio.Event, wait_s: float | None) -> None:
    try:
        async with asyncio.timeout(wait_s):
            await event.wait()
    except TimeoutError:
        pass
