"""Laws of work that is done at a changing speed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.sim.processor_sharing import RunProgress, SharedProcessors

CHANGES = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1_000, 5_000)), max_size=6)


def changed_progress(start_ns: int, slowness: int, changes: list[tuple[int, int]]) -> RunProgress:
    """Changed after so many nanoseconds each."""
    progress, now_ns = RunProgress(start_ns, slowness), start_ns - 50
    for after_ns, changed in changes:
        now_ns += after_ns
        progress.change(now_ns, changed)
    return progress


def test_alone_work_takes_its_time() -> None:
    progress = RunProgress(100, 1_000)
    assert [progress.at(work) for work in (0, 1, 50)] == [100, 101, 150]
    assert [progress.done(now) for now in (0, 100, 150)] == [0, 0, 50]


def test_beside_others_it_takes_longer_from_then_on() -> None:
    progress = RunProgress(0, 1_000)
    progress.change(100, 3_000)
    assert (progress.at(100), progress.at(110)) == (100, 130)
    progress.change(130, 1_000)
    assert (progress.at(90), progress.at(110), progress.at(120)) == (90, 130, 140)


@given(changes=CHANGES, work=st.lists(st.integers(0, 50_000), min_size=2, max_size=8))
def test_more_work_is_done_later_and_is_done_when_it_is_said_to_be(
    changes: list[tuple[int, int]], work: list[int]
) -> None:
    progress = changed_progress(1_000, 1_000, changes)
    times = [progress.at(each) for each in sorted(work)]
    assert times == sorted(times) and times[0] >= 1_000
    assert all(progress.done(progress.at(each)) >= each for each in work)
    assert all(progress.done(progress.at(each) - 1) <= each for each in work)


@given(changes=CHANGES)
def test_what_is_done_stays_so_whatever_changes(changes: list[tuple[int, int]]) -> None:
    progress, now_ns = RunProgress(0, 2_000), 0
    for after_ns, slowness in changes:
        now_ns += after_ns
        before = [progress.done(t) for t in range(0, now_ns + 1, 500)]
        progress.change(now_ns, slowness)
        assert [progress.done(t) for t in range(0, now_ns + 1, 500)] == before


def test_those_that_run_are_told_of_each_other() -> None:
    processors, told = SharedProcessors(500), list[tuple[str, int]]()
    a, b = (lambda slowness: told.append(("a", slowness))), (lambda slowness: told.append(("b", slowness)))
    processors.enter(a)
    assert (processors.slowness, told) == (1_000, [])
    processors.enter(b)
    assert (processors.slowness, told) == (1_500, [("a", 1_500)])
    processors.leave(a)
    assert told == [("a", 1_500), ("b", 1_000)]


def test_with_processors_of_their_own_nobody_is_told() -> None:
    processors, told = SharedProcessors(), list[int]()
    processors.enter(told.append)
    processors.enter(lambda slowness: None)
    assert (processors.slowness, told) == (1_000, [])
