"""Time in the simulator: what is to happen, in order of time, then of scheduling."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any, Final

NEVER_NS: Final = 1 << 60


class EventQueue:
    """Times are integer nanoseconds. Nothing is ever cancelled: an action that other events have overtaken notices it
    itself.

    A sorted list rather than a heap: what is next is at its end, so that only insertions compare. An insertion moves
    all that is to happen before it, which takes less time than comparisons even if those are thousands.
    """

    __slots__ = ("_entries", "_order", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._order = 0
        self._entries: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []  # by -time, -order

    def __len__(self) -> int:
        return len(self._entries)

    def at(self, time_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        assert time_ns >= self.now_ns, f"{time_ns} is past, it is {self.now_ns}"
        self._order += 1
        insort(self._entries, (-time_ns, -self._order, action, arguments))

    def run(self, until_ns: int | None = None) -> None:
        """Runs until nothing is left to happen, or until that time."""
        entries = self._entries
        while entries and (until_ns is None or -entries[-1][0] < until_ns):
            before_ns, _, action, arguments = entries.pop()
            self.now_ns = -before_ns
            action(*arguments)
