"""The pace of a stream: tokens that were made ahead leave one by one, and cover the gaps between turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Generic, TypeVar

from aegis.core.model import Slo

T = TypeVar("T")


class SmoothPace(Generic[T]):
    """When the parts of one stream leave, of which most have a token.

    Token i leaves when it is made, but no earlier than i times TBT after the first one left, or after the first one was
    due, if that was earlier; what has no token leaves with the one before. So (1) parts leave in order; (2) who is on
    time when made is on time when it leaves; (3) while tokens are there, two leave no more than a TBT apart; (4) a
    stream that is late is never held back.
    """

    __slots__ = ("_begun_ns", "_first_due_ns", "_left", "_tbt_ns", "_waiting")

    def __init__(self, slo: Slo, arrival_ns: int) -> None:
        self._tbt_ns = slo.tbt_ns
        self._first_due_ns = slo.due_ns(arrival_ns, 0)
        self._begun_ns: int | None = None
        self._left = 0  # tokens
        self._waiting: deque[tuple[T, int]] = deque()

    def made(self, part: T, *, tokens: int) -> None:
        self._waiting.append((part, tokens))

    def leaving(self, now_ns: int) -> list[T]:
        """Those that leave now."""
        leaving = list[T]()
        while self._waiting and (not self._waiting[0][1] or self.next_ns <= now_ns):
            part, tokens = self._waiting.popleft()
            if tokens and self._begun_ns is None:
                self._begun_ns = min(now_ns, self._first_due_ns)
            self._left += tokens
            leaving.append(part)
        return leaving

    @property
    def next_ns(self) -> int:
        """When the next token may leave; 0: at any time."""
        return 0 if self._begun_ns is None else self._begun_ns + self._left * self._tbt_ns

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def rest(self) -> list[T]:
        """All that is left, at once."""
        left = [part for part, _ in self._waiting]
        self._waiting.clear()
        return left


async def paced(
    parts: AsyncIterable[T], tokens: Callable[[T], int], pace: SmoothPace[T], now_ns: Callable[[], int]
) -> AsyncGenerator[T]:
    """The same parts at that pace; they are taken as they come. What `parts` raises comes behind all others at once."""
    more = asyncio.Event()

    async def read() -> None:
        try:
            async for part in parts:
                pace.made(part, tokens=tokens(part))
                more.set()
        finally:
            more.set()

    reading = asyncio.create_task(read())
    try:
        while True:
            more.clear()
            for part in pace.leaving(now_ns()):
                yield part
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
