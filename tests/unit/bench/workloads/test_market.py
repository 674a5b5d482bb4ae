"""The market against what is published of real ones, by the papers' own definitions.

`PRISM_*`: four production traces (Prism, §3.1 and appendix A.1). A model is active for 120 s after a call; a switch is
a change of the set of active models; an idle interval is a gap of more than 10 s between two calls of a model; the CV
is that of calls per minute; the tail is from the first version of the paper, §3.1. `AEGAEON_TAIL` is the much longer
tail of another market (Aegaeon, §2.2).
"""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, median, pstdev

import pytest

from aegis.core.rng import Stream
from bench.workloads.market import AEGAEON_RPS, Market, popularity

PRISM_MODELS = (24, 129)
PRISM_ACTIVE_WINDOW_S = 120
PRISM_ACTIVE_SHARE = (0.23, 0.50)  # of the models, on average
PRISM_SWITCHES_PER_HOUR = (54, 766)
PRISM_IDLE_S = 10
PRISM_IDLE_INTERVALS_PER_HOUR = (40, 100)  # of many models
PRISM_CV_MIN = 1.0  # of many models
PRISM_TAIL = (0.60, 0.25)  # this share of the models gets that share of the calls
AEGAEON_TAIL = (0.941, 0.0135)
HOURS = 4
DURATION_S = HOURS * 3600


def calls_s(workload: Market) -> list[list[float]]:
    """Of each model, in order."""
    streams = (Stream(1, "arrivals", model) for model in range(workload.models))
    return [sorted(at / 1e9 for at in workload.times_ns(model, draws)) for model, draws in enumerate(streams)]


def active_spans(times: list[float]) -> list[tuple[float, float]]:
    """When the model was called in the last `PRISM_ACTIVE_WINDOW_S`."""
    spans: list[tuple[float, float]] = []
    for time in times:
        stop = min(DURATION_S, time + PRISM_ACTIVE_WINDOW_S)
        if spans and time <= spans[-1][1]:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((time, stop))
    return spans


def idle_intervals_per_hour(times: list[float]) -> float:
    return sum(b - a > PRISM_IDLE_S for a, b in pairwise(times)) / HOURS


def cv_of_minutes(times: list[float]) -> float:
    counts = [0] * (DURATION_S // 60)
    for time in times:
        counts[int(time // 60)] += 1
    return pstdev(counts) / fmean(counts)


@pytest.mark.parametrize("models", [24, 80, 129])
def test_the_defaults_lie_within_the_published_figures(models: int) -> None:
    workload = Market(models=models, duration_s=DURATION_S)
    calls = calls_s(workload)
    spans = [active_spans(times) for times in calls]
    active = sum(stop - start for each in spans for start, stop in each) / DURATION_S / models
    switches = sum(1 + (stop < DURATION_S) for each in spans for _, stop in each) / HOURS
    idle = [idle_intervals_per_hour(times) for times in calls]
    variations = [cv_of_minutes(times) for times in calls if times]
    low, high = PRISM_IDLE_INTERVALS_PER_HOUR
    assert PRISM_MODELS[0] <= models <= PRISM_MODELS[1]
    assert PRISM_ACTIVE_SHARE[0] < active < PRISM_ACTIVE_SHARE[1]
    assert PRISM_SWITCHES_PER_HOUR[0] < switches < PRISM_SWITCHES_PER_HOUR[1]
    assert sum(low <= rate <= high for rate in idle) > models / 3
    assert median(variations) > PRISM_CV_MIN
    assert sum(map(len, calls)) / DURATION_S / models == pytest.approx(AEGAEON_RPS, rel=0.08)


def tail(models: int, alpha: float, share: float) -> float:
    """What the least popular `share` of the models gets."""
    return sum(popularity(models, alpha)[models - round(share * models) :])


def test_popularity_is_as_long_tailed_as_published() -> None:
    models, calls = PRISM_TAIL
    assert tail(80, Market().alpha, models) == pytest.approx(calls, rel=0.1)
    models, calls = AEGAEON_TAIL
    assert tail(80, 3, models) == pytest.approx(calls, rel=0.05)
    assert sum(popularity(129, 0.8)) == pytest.approx(1)


def test_popular_models_are_called_more() -> None:
    calls = [len(times) for times in calls_s(Market(models=10, rps=1, alpha=1, group=2, duration_s=DURATION_S))]
    shares = [count / sum(calls) for count in calls]
    assert shares == pytest.approx(popularity(10, 1), rel=0.1)


def test_bursts_have_the_size_and_the_gap_asked_for() -> None:
    """So rare that no two bursts of a model overlap."""
    workload = Market(models=1, rps=0.001, group=8, gap_s=2, duration_s=10_000_000)
    times = sorted(at / 1e9 for at in workload.times_ns(0, Stream(1)))
    gaps = [b - a for a, b in pairwise(times)]
    inside = [gap for gap in gaps if gap < 60]
    assert fmean(inside) == pytest.approx(2, rel=0.05)
    assert len(times) / (len(gaps) - len(inside) + 1) == pytest.approx(8, rel=0.1)


def test_the_rate_is_as_asked_from_the_first_second_on() -> None:
    """Bursts that began before 0 are there."""
    workload = Market(models=1, rps=0.1, group=50, gap_s=10, duration_s=100)
    counts = [len(list(workload.times_ns(0, Stream(1, n)))) for n in range(3000)]
    assert fmean(counts) == pytest.approx(10, rel=0.05)
