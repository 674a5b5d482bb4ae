"""The latest entries of a history, for readers that ask in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Ring(Generic[T]):
    """Keeps the last `capacity` entries. Each has a number, counted from 0 since the start, so that a reader that asks
    again with `next` misses nothing and gets nothing twice; no clocks have to be compared."""

    __slots__ = ("_entries", "next")

    def __init__(self, capacity: int) -> None:
        self._entries: deque[T] = deque(maxlen=capacity)
        self.next = 0  # the number of the entry that comes next

    def add(self, entries: Iterable[T]) -> None:
        for entry in entries:
            self._entries.append(entry)
            self.next += 1

    def since(self, number: int) -> list[T]:
        """The entries from that number on, as far as they are still kept."""
        count = min(max(self.next - number, 0), len(self._entries))
        newest_first = list(islice(reversed(self._entries), count))  # from the end that is asked for
        return newest_first[::-1]
