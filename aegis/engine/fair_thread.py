"""One thread that works for several callers: of those that wait each has its turn, however much one of them wants, and
of its jobs the smallest is done."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from heapq import heapify, heappop, heappush
from itertools import count
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[int, int, "Future[Any]", Callable[[], Any]]  # its size, and its number


class Crowded(Exception):
    """The caller has as many jobs waiting as it may have."""


class FairThread:
    """Runs while there are jobs, and keeps no process from ending. A job whose future is cancelled before it begins is
    left out."""

    def __init__(self, *, most_waiting: int) -> None:
        """`most_waiting` jobs of one caller, besides the one that runs."""
        self._most_waiting = most_waiting
        self._lock = Lock()
        self._numbers = count()
        self._waiting: OrderedDict[str, list[_Job]] = OrderedDict()  # heaps by caller, whose turn is next first
        self._served = ""  # last
        self._running = False

    def submit(self, caller: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Raises Crowded."""
        future: Future[T] = Future()
        with self._lock:
            jobs = self._waiting.setdefault(caller, [])
            if len(jobs) >= self._most_waiting:
                jobs[:] = [job for job in jobs if not job[2].cancelled()]
                heapify(jobs)
            if len(jobs) >= self._most_waiting:
                raise Crowded
            heappush(jobs, (size, next(self._numbers), future, work))
            if not self._running:
                self._running = True
                Thread(target=self._run, daemon=True).start()
        return future

    def _run(self) -> None:
        while job := self._next():
            _, _, future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is for who waits
                future.set_exception(error)

    def _next(self) -> _Job | None:
        with self._lock:
            if not self._waiting:
                self._running = False
                return None
            # Whoever had the last turn may have come again before the others did.
            self._served = next((caller for caller in self._waiting if caller != self._served), self._served)
            jobs = self._waiting.pop(self._served)
            job = heappop(jobs)
            if jobs:
                self._waiting[self._served] = jobs
            return job
