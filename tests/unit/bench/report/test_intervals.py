"""Time covered by intervals, beside counting one moment after the other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.report.intervals import Covered, dealt, edges
from tests.unit.bench.report.made import MS, span

moments = st.integers(0, 30)
intervals = st.lists(st.tuples(moments, moments), max_size=8)


@given(intervals, moments, moments)
def test_covered_counts_each_moment_once(made: list[tuple[int, int]], start: int, stop: int) -> None:
    union = {moment for low, high in made for moment in range(low, high)}
    assert Covered(made).total_ns == len(union)
    assert Covered(made).within(start, stop) == len(union & set(range(start, stop)))


@given(st.lists(st.tuples(moments, moments.filter(bool), st.integers(0, 100)), min_size=1, max_size=8))
def test_nothing_that_is_dealt_is_lost(made: list[tuple[int, int, int]]) -> None:
    spans = [span("load", start, start + length) for start, length, _ in made]
    amounts = [amount for _, _, amount in made]
    assert np.isclose(dealt(spans, amounts, edges(0, 60 * MS, 7)).sum(), sum(amounts))


def test_a_span_is_dealt_evenly_to_its_time() -> None:
    assert dealt([span("load", 5, 25)], [20.0], edges(0, 40 * MS, 4)).tolist() == [5.0, 10.0, 5.0, 0.0]
