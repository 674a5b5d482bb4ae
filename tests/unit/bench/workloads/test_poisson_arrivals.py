"""True Poisson: the count over the whole span varies as much as its mean."""

from __future__ import annotations

from statistics import fmean, pvariance

import pytest

from aegis.core.rng import Stream
from bench.workloads.arrival_processes import Poisson


def test_counts_have_the_mean_and_the_variance_of_poisson() -> None:
    workload = Poisson(rps=0.1, duration_s=600)
    counts = [len(list(workload.times_ns(model, Stream(1, model)))) for model in range(2000)]
    assert fmean(counts) == pytest.approx(60, rel=0.01)
    assert pvariance(counts) == pytest.approx(60, rel=0.1)


def test_arrivals_are_in_order_within_the_duration() -> None:
    times = list(Poisson(rps=50, duration_s=3).times_ns(0, Stream(1)))
    assert times == sorted(times)
    assert times[0] >= 0 and 2.8e9 < times[-1] < 3e9


def test_twice_the_rate_is_the_same_chance_twice_as_fast() -> None:
    slow = list(Poisson(rps=1, duration_s=20).times_ns(0, Stream(1)))
    fast = list(Poisson(rps=2, duration_s=10).times_ns(0, Stream(1)))
    assert len(slow) == len(fast)
    assert all(abs(2 * at - other) <= len(slow) for at, other in zip(fast, slow, strict=True))
