"""A ring keeps the last entries, and whoever asks in time gets each once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.telemetry.ring import Ring


@given(capacity=st.integers(1, 5), batches=st.lists(st.integers(0, 4), max_size=8), number=st.integers(0, 40))
def test_the_last_entries_are_kept_by_number(capacity: int, batches: list[int], number: int) -> None:
    ring = Ring[int](capacity)
    for size in batches:
        ring.add(range(ring.next, ring.next + size))
    total = sum(batches)
    assert ring.next == total
    assert ring.since(number) == list(range(max(number, total - capacity, 0), total))


def test_who_asks_again_misses_nothing_and_gets_nothing_twice() -> None:
    ring, got, number = Ring[int](3), list[int](), 0
    for first in range(0, 12, 3):
        ring.add(range(first, first + 3))
        got += ring.since(number)
        number = ring.next
    assert got == list(range(12))
