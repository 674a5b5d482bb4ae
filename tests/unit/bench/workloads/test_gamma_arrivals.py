"""Gamma gaps: the coefficient of variation asked for, and no bias from where the workload begins."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from aegis.core.rng import Stream
from bench.workloads.arrival_processes import Gamma
from tests.long_forms import first_of


@pytest.mark.parametrize("cv", first_of(1, [2.5, 0.3, 1.0]))
def test_gaps_have_the_mean_and_the_variation_asked_for(cv: float) -> None:
    times = list(Gamma(rps=2, duration_s=20_000, cv=cv).times_ns(0, Stream(1, "gaps")))
    gaps = [b - a for a, b in pairwise(times)]
    assert fmean(gaps) == pytest.approx(5e8, rel=0.04)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("at", first_of(1, [0, 300]))
def test_the_rate_is_as_asked_from_the_first_second_on(at: int) -> None:
    """A process begun by a gap would make (16 − 1) / 2 arrivals per model too many, most of them at the start."""
    workload, models = Gamma(rps=0.1, duration_s=400, cv=4), 4000
    streams = (Stream(1, "start", model) for model in range(models))
    times = [time_ns / 1e9 for model, draws in enumerate(streams) for time_ns in workload.times_ns(model, draws)]
    assert sum(at <= time < at + 100 for time in times) / models == pytest.approx(10, rel=0.08)
