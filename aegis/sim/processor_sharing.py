"""Runs that share the processors of their node, as the instances of a CPU device do.

A run that has `n` others beside it takes `1 + contention * n` times as long as alone, for as long as they run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_ALONE: Final = 1_000  # per mille


class RunProgress:
    """The progress of a run over time. Work is counted in the nanoseconds that it takes alone."""

    __slots__ = ("_marks",)

    def __init__(self, start_ns: int, slowness: int) -> None:
        """`slowness` is in thousandths: 1000 is alone."""
        self._marks = [(start_ns, 0, slowness)]  # from a time on, at which so much was done

    def at(self, work_ns: int) -> int:
        """The time at which so much is, or will be done if nothing changes."""
        start_ns, done_ns, slowness = next(mark for mark in reversed(self._marks) if mark[1] <= work_ns)
        return start_ns - (done_ns - work_ns) * slowness // _ALONE

    def done(self, now_ns: int) -> int:
        """The work done by then; 0 before the start."""
        for start_ns, done_ns, slowness in reversed(self._marks):
            if start_ns <= now_ns:
                return done_ns + (now_ns - start_ns) * _ALONE // slowness
        return 0

    def change(self, now_ns: int, slowness: int) -> None:
        start_ns = max(now_ns, self._marks[0][0])
        mark = (start_ns, self.done(start_ns), slowness)
        if start_ns == self._marks[-1][0]:
            self._marks.pop()
        self._marks.append(mark)


class SharedProcessors:
    """The processors that instances share. `contention` is in thousandths; 0: each has its own."""

    __slots__ = ("_busy", "_contention")

    def __init__(self, contention: int = 0) -> None:
        self._contention = contention
        self._busy: dict[Callable[[int], None], None] = {}  # in order

    @property
    def shared(self) -> bool:
        return self._contention > 0

    @property
    def slowness(self) -> int:
        """The slowness of each run under way."""
        return _ALONE + self._contention * max(len(self._busy) - 1, 0)

    def enter(self, changed: Callable[[int], None]) -> None:
        """A run begins. `changed` is told the slowness of it from now on, until `leave`, whenever that changes."""
        others = list(self._busy)
        self._busy[changed] = None
        self._tell(others)

    def leave(self, changed: Callable[[int], None]) -> None:
        self._busy.pop(changed, None)
        self._tell(list(self._busy))

    def _tell(self, others: list[Callable[[int], None]]) -> None:
        if self._contention:
            for changed in others:
                changed(self.slowness)
