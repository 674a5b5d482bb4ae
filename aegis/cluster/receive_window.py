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


class Arrived(NamedTuple):
    """A chunk that was `wanted` is there; `sound` if its checksum says so."""

    chunk: int
    sound: bool


class Broken(NamedTuple):
    """The connection ended; what was asked for on it will not come."""


class Silent(NamedTuple):
    """Nothing has come for so long that nothing will."""


class Unknown(NamedTuple):
    """The sender has no such bytes, or no longer."""


class Ask(NamedTuple):
    chunk: int


class Reconnect(NamedTuple):
    """Requests from here on go over a new connection."""


class Done(NamedTuple):
    pass


class Failed(NamedTuple):
    why: Why


Event = Arrived | Broken | Silent | Unknown
Effect = Ask | Reconnect | Done | Failed


class Window:
    """Of `chunks` chunks, `[0, chunks)`."""

    __slots__ = ("_arrived", "_asked", "_damaged", "_ended", "_fresh", "_lost", "_width", "chunks")

    def __init__(self, chunks: int, width: int) -> None:
        assert chunks >= 0 and width > 0
        self.chunks = chunks
        self._width = width
        self._fresh: Iterator[int] = iter(range(chunks))
        self._asked: dict[int, None] = {}  # in the order of asking
        self._arrived: set[int] = set()
        self._damaged: Counter[int] = Counter()
        self._lost = 0
        self._ended = False

    def start(self) -> list[Effect]:
        return self._go_on([])

    def wanted(self, chunk: int) -> bool:
        """Whether the bytes of this chunk have a place to go to; else they are somebody's already."""
        return chunk in self._asked and not self._ended

    def on(self, event: Event) -> list[Effect]:
        if self._ended:
            return []
        match event:
            case Arrived(chunk, sound):
                return self._on_arrived(chunk, sound)
            case Broken():
                self._lost += 1
                again: list[Effect] = [Reconnect(), *map(Ask, self._asked)]
                return again if self._lost < TRIES else self._fail("lost")
            case Silent():
                return self._fail("silent")
            case Unknown():
                return self._fail("unknown")

    def _on_arrived(self, chunk: int, sound: bool) -> list[Effect]:
        if chunk not in self._asked:
            return []
        if not sound:
            self._damaged[chunk] += 1
            return [Ask(chunk)] if self._damaged[chunk] < TRIES else self._fail("damaged")
        self._lost = 0
        del self._asked[chunk]
        self._arrived.add(chunk)
        return self._go_on([])

    def _go_on(self, effects: list[Effect]) -> list[Effect]:
        while len(self._asked) < self._width and (chunk := next(self._fresh, None)) is not None:
            self._asked[chunk] = None
            effects.append(Ask(chunk))
        if len(self._arrived) == self.chunks:
            self._ended = True
            effects.append(Done())
        return effects

    def _fail(self, why: Why) -> list[Effect]:
        self._ended = True
        return [Failed(why)]
