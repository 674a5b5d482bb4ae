"""The requests of the receiving side of a transfer, and the point at which it gives up: chunks by number, a few at a
time.

The bound on requested chunks holds the sender back, and still keeps the link full while a chunk is checked.

Laws: (W1) at most `width` chunks are asked for and not there; (W2) `Done` comes when each chunk has arrived sound, and
nothing after it or after `Failed`; (W3) a chunk that has arrived sound is neither asked for nor taken again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

TRIES = 3
"""So often a chunk may come damaged, and so often in a row a connection may end without having brought one."""

Why = Literal["damaged", "lost", "silent", "unknown"]


class ChunkArrived(NamedTuple):
    """A chunk that was `wanted` is there; `sound` if its checksum says so."""

    chunk: int
    sound: bool


class ConnectionBroken(NamedTuple):
    """The connection ended; what was asked for on it will not come."""


class TimedOut(NamedTuple):
    """Nothing has come for so long that nothing will."""


class RegionUnknown(NamedTuple):
    """The sender has no such bytes, or no longer."""


class RequestChunk(NamedTuple):
    chunk: int


class Reconnect(NamedTuple):
    """Requests from here on go over a new connection."""


class Done(NamedTuple):
    pass


class Failed(NamedTuple):
    why: Why


Event = ChunkArrived | ConnectionBroken | TimedOut | RegionUnknown
Effect = RequestChunk | Reconnect | Done | Failed


class Window:
    """The transfer of `chunks` chunks, `[0, chunks)`."""

    __slots__ = ("_arrived", "_damaged", "_ended", "_fresh", "_lost", "_requested", "_width", "chunks")

    def __init__(self, chunks: int, width: int) -> None:
        assert chunks >= 0 and width > 0
        self.chunks = chunks
        self._width = width
        self._fresh: Iterator[int] = iter(range(chunks))
        self._requested: dict[int, None] = {}  # in the order of asking
        self._arrived: set[int] = set()
        self._damaged: Counter[int] = Counter()
        self._lost = 0
        self._ended = False

    def start(self) -> list[Effect]:
        return self._go_on([])

    def wanted(self, chunk: int) -> bool:
        """Whether the bytes of this chunk have a place to go to; else the place belongs to another transfer already."""
        return chunk in self._requested and not self._ended

    def on(self, event: Event) -> list[Effect]:
        if self._ended:
            return []
        match event:
            case ChunkArrived(chunk, sound):
                return self._on_arrived(chunk, sound)
            case ConnectionBroken():
                self._lost += 1
                again: list[Effect] = [Reconnect(), *map(RequestChunk, self._requested)]
                return again if self._lost < TRIES else self._fail("lost")
            case TimedOut():
                return self._fail("silent")
            case RegionUnknown():
                return self._fail("unknown")

    def _on_arrived(self, chunk: int, sound: bool) -> list[Effect]:
        if chunk not in self._requested:
            return []
        if not sound:
            self._damaged[chunk] += 1
            return [RequestChunk(chunk)] if self._damaged[chunk] < TRIES else self._fail("damaged")
        self._lost = 0
        del self._requested[chunk]
        self._arrived.add(chunk)
        return self._go_on([])

    def _go_on(self, effects: list[Effect]) -> list[Effect]:
        while len(self._requested) < self._width and (chunk := next(self._fresh, None)) is not None:
            self._requested[chunk] = None
            effects.append(RequestChunk(chunk))
        if len(self._arrived) == self.chunks:
            self._ended = True
            effects.append(Done())
        return effects

    def _fail(self, why: Why) -> list[Effect]:
        self._ended = True
        return [Failed(why)]
