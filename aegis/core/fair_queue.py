"""A queue for several callers that wait for one worker: callers take turns, however much one of them wants. The
smallest of a caller's jobs is next, but its oldest in every fourth turn, so that no large one waits for ever."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

J = TypeVar("J")

_OLDEST_EVERY = 4


class QueueFull(Exception):
    """The caller has as many jobs waiting as it may have."""


class _Line(Generic[J]):
    """The jobs of one caller."""

    __slots__ = ("_taken", "jobs")

    def __init__(self) -> None:
        self.jobs: list[tuple[int, int, J]] = []  # a heap of sizes and numbers
        self._taken = 0

    def take(self) -> J:
        self._taken += 1
        if self._taken % _OLDEST_EVERY:
            return heappop(self.jobs)[2]
        at = min(range(len(self.jobs)), key=lambda i: self.jobs[i][1])
        _, _, job = self.jobs[at]
        self.jobs[at] = self.jobs[-1]
        self.jobs.pop()
        heapify(self.jobs)
        return job


class FairQueue(Generic[J]):
    """Not for several threads at once."""

    __slots__ = ("_is_left", "_most_waiting", "_number", "_served", "_waiting")

    def __init__(self, *, most_waiting: int, is_left: Callable[[J], bool] = lambda _: False) -> None:
        """`most_waiting` jobs of one caller may wait; jobs whose caller `is_left` reports as gone do not count."""
        self._most_waiting = most_waiting
        self._is_left = is_left
        self._number = 0
        self._waiting: OrderedDict[str, _Line[J]] = OrderedDict()  # whose turn is next first
        self._served = ""  # last

    def put(self, caller: str, size: int, job: J) -> None:
        """Raises QueueFull."""
        line = self._waiting.get(caller) or _Line[J]()
        if len(line.jobs) >= self._most_waiting:
            line.jobs[:] = [waiting for waiting in line.jobs if not self._is_left(waiting[2])]
            heapify(line.jobs)
        if len(line.jobs) >= self._most_waiting:
            raise QueueFull
        self._number += 1
        heappush(line.jobs, (size, self._number, job))
        self._waiting[caller] = line

    def take(self) -> J | None:
        """The next job; None if none waits."""
        while self._waiting:
            # The caller that had the last turn may have come again before the others did.
            self._served = next((caller for caller in self._waiting if caller != self._served), self._served)
            line = self._waiting.pop(self._served)
            job = line.take()
            if line.jobs:
                self._waiting[self._served] = line
            if not self._is_left(job):
                return job
        return None
