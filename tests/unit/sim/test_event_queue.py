"""The simulator's events, in their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.sim.event_queue import EventQueue


@given(st.lists(st.integers(0, 5)))
def test_order_is_that_of_time_and_then_of_scheduling(times_ns: list[int]) -> None:
    agenda, happened = EventQueue(), list[tuple[int, int]]()
    for number, time_ns in enumerate(times_ns):
        agenda.at(time_ns, lambda n: happened.append((agenda.now_ns, n)), number)
    assert len(agenda) == len(times_ns)
    agenda.run()
    assert happened == sorted((time_ns, number) for number, time_ns in enumerate(times_ns))
    assert not len(agenda)


def test_what_is_scheduled_meanwhile_has_its_place_too() -> None:
    agenda, happened = EventQueue(), list[str]()

    def first() -> None:
        happened.append("first")
        agenda.at(1, happened.append, "now, and last of those")
        agenda.at(2, happened.append, "before the third")

    agenda.at(1, first)
    agenda.at(1, happened.append, "second")
    agenda.at(3, happened.append, "third")
    agenda.run()
    assert happened == ["first", "second", "now, and last of those", "before the third", "third"]


def test_a_run_stops_before_its_end() -> None:
    agenda, happened = EventQueue(), list[int]()
    for time_ns in (1, 2, 3):
        agenda.at(time_ns, happened.append, time_ns)
    agenda.run(2)
    assert (happened, agenda.now_ns, len(agenda)) == ([1], 1, 2)
