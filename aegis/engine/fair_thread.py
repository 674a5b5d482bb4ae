"""One thread that works for several callers: of those that wait each has its turn, however much one of them wants."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple["Future[Any]", Callable[[], Any]]


class Crowded(Exception):
    """The caller has as many jobs waiting as it may have."""


class FairThread:
    """Runs while there are jobs, and keeps no process from ending. A job whose future is cancelled before it begins is
    left out."""

    def __init__(self, *, most_waiting: int) -> None:
        """`most_waiting` jobs of one caller, besides the one that runs."""
        self._most_waiting = most_waiting
        self._lock = Lock()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # by caller, whose turn is next first
        self._running = False

    def submit(self, caller: str, work: Callable[[], T]) -> Future[T]:
        """Raises Crowded."""
        future: Future[T] = Future()
        with self._lock:
            jobs = self._waiting.setdefault(caller, deque())
            for job in [job for job in jobs if job[0].cancelled()]:
                jobs.remove(job)
            if len(jobs) >= self._most_waiting:
                raise Crowded
            jobs.append((future, work))
            if not self._running:
                self._running = True
                Thread(target=self._run, daemon=True).start()
        return future

    def _run(self) -> None:
        while job := self._next():
            future, work = job
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
            caller, jobs = self._waiting.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._waiting[caller] = jobs
            return job
