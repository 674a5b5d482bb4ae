"""Percentiles by the nearest rank."""

from bench.common.percentiles import percentile, percentile_of


def test_a_percentile_is_the_nearest_rank() -> None:
    assert [percentile(range(1, 101), p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert [percentile([7, 8, 9], p) for p in (33, 34, 67)] == [7, 8, 9]
    assert percentile([], 50) is None


def test_values_need_no_order() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert (percentile_of(values, 99), percentile_of([3.0, 1.0], 50), percentile_of([], 99)) == (198, 1, 0)
