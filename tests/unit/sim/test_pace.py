"""Laws of work done at a changing pace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.sim.pace import Cores, Pace

CHANGES = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1_000, 5_000)), max_size=6)


def paced(start_ns: int, slowness: int, changes: list[tuple[int, int]]) -> Pace:
    """Changed after so many nanoseconds each."""
    pace, now_ns = Pace(start_ns, slowness), start_ns - 50
    for after_ns, changed in changes:
        now_ns += after_ns
        pace.change(now_ns, changed)
    return pace


def test_alone_work_takes_its_time() -> None:
    pace = Pace(100, 1_000)
    assert [pace.at(work) for work in (0, 1, 50)] == [100, 101, 150]
    assert [pace.done(now) for now in (0, 100, 150)] == [0, 0, 50]


def test_beside_others_it_takes_longer_from_then_on() -> None:
    pace = Pace(0, 1_000)
    pace.change(100, 3_000)
    assert (pace.at(100), pace.at(110)) == (100, 130)
    pace.change(130, 1_000)
    assert (pace.at(90), pace.at(110), pace.at(120)) == (90, 130, 140)


@given(changes=CHANGES, work=st.lists(st.integers(0, 50_000), min_size=2, max_size=8))
def test_more_work_is_done_later_and_is_done_when_it_is_said_to_be(
    changes: list[tuple[int, int]], work: list[int]
) -> None:
    pace = paced(1_000, 1_000, changes)
    times = [pace.at(each) for each in sorted(work)]
    assert times == sorted(times) and times[0] >= 1_000
    assert all(pace.done(pace.at(each)) >= each for each in work)
    assert all(pace.done(pace.at(each) - 1) <= each for each in work)


@given(changes=CHANGES)
def test_what_is_done_stays_so_whatever_changes(changes: list[tuple[int, int]]) -> None:
    pace, now_ns = Pace(0, 2_000), 0
    for after_ns, slowness in changes:
        now_ns += after_ns
        before = [pace.done(t) for t in range(0, now_ns + 1, 500)]
        pace.change(now_ns, slowness)
        assert [pace.done(t) for t in range(0, now_ns + 1, 500)] == before


def test_those_that_run_are_told_of_each_other() -> None:
    cores, told = Cores(500), list[tuple[str, int]]()
    a, b = (lambda slowness: told.append(("a", slowness))), (lambda slowness: told.append(("b", slowness)))
    cores.enter(a)
    assert (cores.slowness, told) == (1_000, [])
    cores.enter(b)
    assert (cores.slowness, told) == (1_500, [("a", 1_500)])
    cores.leave(a)
    assert told == [("a", 1_500), ("b", 1_000)]


def test_with_processors_of_their_own_nobody_is_told() -> None:
    cores, told = Cores(), list[int]()
    cores.enter(told.append)
    cores.enter(lambda slowness: None)
    assert (cores.slowness, told) == (1_000, [])
