"""Callers take turns on one thread, whatever each of them asks for."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from threading import Event

import pytest

from aegis.core.fair_queue import QueueFull
from aegis.engine.grammar.trials import FairThread

WAIT_S = 10


class Held:
    """A thread whose first job, the caller 'greedy''s, ends when it is let go."""

    def __init__(self, most_waiting: int = 8) -> None:
        self.thread = FairThread(most_waiting=most_waiting)
        self.done: list[str] = []
        self._begun, self._let_go = Event(), Event()
        self.first = self.thread.submit("greedy", 0, self._wait)
        assert self._begun.wait(WAIT_S)

    def _wait(self) -> None:
        self._begun.set()
        assert self._let_go.wait(WAIT_S)

    def let_go(self) -> None:
        self._let_go.set()

    def add(self, caller: str, name: str, size: int = 0) -> Future[None]:
        return self.thread.submit(caller, size, lambda: self.done.append(name))


def test_who_asks_for_much_waits_for_who_asks_for_little() -> None:
    held = Held()
    jobs = [held.add("greedy", f"greedy {i}") for i in range(3)] + [held.add("b", "b"), held.add("c", "c")]
    held.let_go()
    for job in jobs:
        job.result(WAIT_S)
    assert held.done == ["b", "greedy 0", "c", "greedy 1", "greedy 2"]


def test_the_smallest_of_a_caller_is_first_and_the_older_of_two_alike() -> None:
    held = Held()
    jobs = [held.add("greedy", name, size) for name, size in (("large", 9), ("small", 1), ("as small", 1), ("none", 0))]
    held.let_go()
    for job in jobs:
        job.result(WAIT_S)
    assert held.done == ["none", "small", "as small", "large"]


def test_what_nobody_waits_for_is_left_out_and_makes_room() -> None:
    held = Held(most_waiting=2)
    given_up, kept = held.add("greedy", "given up"), held.add("greedy", "kept")
    with pytest.raises(QueueFull):
        held.add("greedy", "too many")
    other = held.add("b", "b")
    assert given_up.cancel()
    last = held.add("greedy", "last")
    held.let_go()
    for job in (kept, other, last):
        job.result(WAIT_S)
    assert held.done == ["b", "kept", "last"]
    with pytest.raises(CancelledError):
        given_up.result(WAIT_S)


def test_a_job_that_breaks_harms_no_other_and_the_thread_comes_back() -> None:
    thread = FairThread(most_waiting=1)
    broken = thread.submit("a", 0, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        broken.result(WAIT_S)
    for i in range(50):
        assert thread.submit("a", 0, lambda i=i: i).result(WAIT_S) == i  # type: ignore[misc]
