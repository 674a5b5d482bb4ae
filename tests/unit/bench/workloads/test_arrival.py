"""The order of a workload."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.workloads.arrival import Arrival, in_order, model_name


def test_the_order_is_by_time_then_model_then_making() -> None:
    late, b, a, a_again = (
        Arrival(at_ns, model_name(model), n, 1) for n, (at_ns, model) in enumerate([(2, 0), (1, 1), (1, 0), (1, 0)], 1)
    )
    assert in_order([late, b, a, a_again]) == [a, a_again, b, late]


@given(st.lists(st.integers(0, 3)))
def test_no_arrival_is_lost(times: list[int]) -> None:
    arrivals = [Arrival(at_ns, model_name(0), n + 1, 1) for n, at_ns in enumerate(times)]
    ordered = in_order(arrivals)
    assert sorted(ordered, key=lambda arrival: arrival.input_tokens) == arrivals
    assert [arrival.at_ns for arrival in ordered] == sorted(times)


def test_names_of_models_sort_as_their_numbers() -> None:
    names = [model_name(index) for index in range(1000)]
    assert names[:2] == ["m000", "m001"]
    assert names == sorted(names)
