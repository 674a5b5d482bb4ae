"""One thread that works for several callers, by turns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any, TypeVar

from aegis.core.fair_queue import FairQueue

T = TypeVar("T")

_Job = tuple["Future[Any]", Callable[[], Any]]


class FairThread:
    """Runs while there are jobs, and keeps no process from ending. A job whose future is cancelled before it begins is
    left out."""

    def __init__(self, *, most_waiting: int) -> None:
        """`most_waiting` jobs of one caller, besides the one that runs."""
        self._lock = Lock()
        self._queue = FairQueue[_Job](most_waiting=most_waiting, is_left=lambda job: job[0].cancelled())
        self._running = False

    def submit(self, caller: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Raises Crowded."""
        future: Future[T] = Future()
        with self._lock:
            self._queue.put(caller, size, (future, work))
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
            job = self._queue.take()
            self._running = job is not None
            return job
