"""Threads in virtual time: exactly one runs at any moment, woken in order of time, then of scheduling."""

from __future__ import annotations

import threading
from collections.abc import Callable

from aegis.sim.event_queue import EventQueue

_PATIENCE_S = 60.0


def _closed() -> threading.Lock:
    """What one thread waits for and another one opens, in turns. A semaphore would do it in Python."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Conductor:
    """Lets what is on the agenda happen, and with it its actors run. Implements `aegis.core.clock.Clock`."""

    def __init__(self) -> None:
        self.agenda = EventQueue()
        self.back = _closed()  # opened where an actor waits again, or has ended

    def now_ns(self) -> int:
        return self.agenda.now_ns


class Actor:
    """A thread that runs when it is its turn, until it waits."""

    def __init__(self, conductor: Conductor, work: Callable[[Actor], None]) -> None:
        self._conductor = conductor
        self._turn = _closed()
        self._waits = 0  # so many waits have begun or ended
        self._listening = False
        self._error: BaseException | None = None
        self._work = work
        threading.Thread(target=self._run, daemon=True).start()

    def start(self) -> None:
        """To its first wait."""
        self._resume()

    def wait(self, until_ns: int | None, *, listening: bool) -> None:
        """In its own thread: until that time or, where it is `listening`, until it is nudged."""
        self._waits += 1
        self._listening = listening
        if until_ns is not None:
            self._conductor.agenda.at(until_ns, self._wake, self._waits)
        self._conductor.back.release()
        self._turn.acquire()

    def nudge(self) -> None:
        """Something has happened: what it listens for, perhaps."""
        if self._listening:
            self._resume()

    def _wake(self, wait: int) -> None:
        if wait == self._waits:
            self._resume()

    def _resume(self) -> None:
        self._waits += 1
        self._listening = False
        self._turn.release()
        assert self._conductor.back.acquire(timeout=_PATIENCE_S), "an actor waits for something real"
        if self._error:
            raise self._error

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self._work(self)
        except Exception as error:  # noqa: BLE001  # the conductor's thread raises it
            self._error = error
        self._conductor.back.release()
