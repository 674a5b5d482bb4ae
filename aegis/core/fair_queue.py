"""A queue for several callers that wait for one worker: callers take turns, however much one of them wants, and the
smallest of a caller's jobs is next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

J = TypeVar("J")


class QueueFull(Exception):
    """The caller has as many jobs waiting as it may have."""


class FairQueue(Generic[J]):
    """Not for several threads at once."""

    __slots__ = ("_is_left", "_most_waiting", "_number", "_served", "_waiting")

    def __init__(self, *, most_waiting: int, is_left: Callable[[J], bool] = lambda _: False) -> None:
        """`most_waiting` jobs of one caller may wait; jobs whose caller `is_left` reports as gone do not count."""
        self._most_waiting = most_waiting
        self._is_left = is_left
        self._number = 0
        self._waiting: OrderedDict[str, list[tuple[int, int, J]]] = OrderedDict()  # heaps, whose turn is next first
        self._served = ""  # last

    def put(self, caller: str, size: int, job: J) -> None:
        """Raises Crowded."""
        jobs = self._waiting.get(caller, [])
        if len(jobs) >= self._most_waiting:
            jobs[:] = [waiting for waiting in jobs if not self._is_left(waiting[2])]
            heapify(jobs)
        if len(jobs) >= self._most_waiting:
            raise QueueFull
        self._number += 1
        heappush(jobs, (size, self._number, job))
        self._waiting[caller] = jobs

    def take(self) -> J | None:
        """The next job; None if none waits."""
        while self._waiting:
            # The caller that had the last turn may have come again before the others did.
            self._served = next((caller for caller in self._waiting if caller != self._served), self._served)
            jobs = self._waiting.pop(self._served)
            _, _, job = heappop(jobs)
            if jobs:
                self._waiting[self._served] = jobs
            if not self._is_left(job):
                return job
        return None
