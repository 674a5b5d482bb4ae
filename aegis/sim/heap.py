"""Time in the simulator: what is to happen, in order of time, then of scheduling."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

NEVER_NS = 1 << 60


class Heap:
    """Integer nanoseconds. Nothing is ever taken off: what was overtaken by events finds so itself."""

    __slots__ = ("_entries", "_order", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._order = 0
        self._entries: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def at(self, time_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        assert time_ns >= self.now_ns, f"{time_ns} is past, it is {self.now_ns}"
        self._order += 1
        heappush(self._entries, (time_ns, self._order, action, arguments))

    def run(self, until_ns: int | None = None) -> None:
        """Until nothing is left to happen, or before that time."""
        entries = self._entries
        while entries and (until_ns is None or entries[0][0] < until_ns):
            self.now_ns, _, action, arguments = heappop(entries)
            action(*arguments)
