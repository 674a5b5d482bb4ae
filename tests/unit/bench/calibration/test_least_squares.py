"""Fits of durations that are sums of costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.calibration.least_squares import fit, quality, usual_mean

COSTS = st.tuples(*[st.floats(0, 1e6)] * 3).filter(lambda costs: sum(costs) > 1)


def features(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(1, 50, size=(rows, 3))


@given(costs=COSTS)
def test_exact_sums_are_found(costs: tuple[float, ...]) -> None:
    x = features(40)
    found = fit(x, x @ np.array(costs))
    assert found == pytest.approx(costs, rel=1e-4, abs=1e-3 * max(costs))
    assert (found >= 0).all()


def test_no_cost_is_negative_though_less_would_fit_better() -> None:
    x = features(200)
    found = fit(x, np.maximum(x @ np.array([500.0, -50.0, 300.0]), 1.0))
    assert found[1] == 0 and (found[[0, 2]] > 0).all()


def test_of_many_features_the_costs_are_found_too() -> None:
    """As with 40 others beside a run: subsets of so many features are 2^41."""
    random = np.random.default_rng(3)
    x, costs = random.uniform(0, 1, size=(400, 41)), random.uniform(0, 1e6, size=41)
    costs[::3] = 0.0
    assert fit(x, x @ costs) == pytest.approx(costs, rel=1e-3, abs=1e-3 * costs.max())
    costs[::3] = -1e5
    found = fit(x, x @ costs)
    assert (found >= 0).all() and (found == 0).any()
    assert (x @ found).sum() == pytest.approx((x @ costs).sum(), rel=0.01)


def test_many_features_that_are_the_same_are_one() -> None:
    x = np.repeat(features(60), 5, axis=1)
    costs = np.zeros(15)
    costs[::5] = (300.0, 200.0, 100.0)
    assert x @ fit(x, x @ costs) == pytest.approx(x @ costs, rel=1e-4)


def test_the_fit_says_of_all_together_what_they_took() -> None:
    x = features(500)
    noise = np.random.default_rng(1).exponential(1.0, size=500)
    seen = x @ np.array([400.0, 100.0, 300.0]) * np.minimum(noise, 4.0)
    assert (x @ fit(x, seen)).sum() == pytest.approx(seen.sum(), rel=0.01)


def test_a_hiccup_moves_nothing_much() -> None:
    x = features(300)
    seen = x @ np.array([400.0, 100.0, 300.0])
    seen[::50] *= 1_000
    assert (x @ fit(x, seen)).sum() == pytest.approx((x @ np.array([400.0, 100.0, 300.0])).sum(), rel=0.15)


def test_quality_is_of_what_the_fit_has_not_seen() -> None:
    x = features(100)
    seen = x @ np.array([400.0, 100.0, 300.0])
    perfect = quality(x, seen)
    assert (perfect.observations, perfect.r2) == (100, pytest.approx(1.0))
    assert perfect.worst < 1e-3
    known = np.stack([np.ones(100), np.arange(100) == 7], axis=1)  # that one has a cost of its own
    spoilt = quality(known, known @ np.array([100.0, 900.0]))
    assert spoilt.worst == pytest.approx(0.9) and spoilt.r2 < 0.1 and spoilt.typical < 1e-3


def test_too_few_observations_have_no_quality() -> None:
    assert quality(features(4), np.ones(4)).observations == 0


def test_the_usual_mean() -> None:
    assert usual_mean([]) == 0
    assert usual_mean([10, 20, 30]) == 20
    assert usual_mean([10, 10, 10, 10_000]) == 20


def test_sums_that_are_all_alike_are_judged_by_their_parts() -> None:
    """Of the sums there is nothing to explain, of how long a part takes nearly all."""
    draws = np.random.default_rng(1)
    grows = draws.uniform(1, 20, size=400)
    counts = 30 / (2 + grows)
    x = counts[:, None] * np.stack([np.ones(400), grows], axis=1)
    sums = 30 * draws.normal(1, 0.05, size=400)
    assert quality(x, sums).r2 < 0.1
    assert quality(x, sums, counts).r2 > 0.95


def test_each_part_counts_once() -> None:
    """Sums of few parts are far off here, and those of many are not."""
    draws = np.random.default_rng(1)
    x = np.stack([np.ones(400), draws.uniform(1, 20, size=400)], axis=1)
    counts = np.where(draws.random(400) < 0.5, 1.0, 100.0)
    parts = (x @ np.array([500.0, 100.0])) * draws.normal(1, 0.4 / np.sqrt(counts))
    assert quality(x, parts).r2 < 0.8
    assert quality(x * counts[:, None], parts * counts, counts).r2 > 0.95


def repeated(occasions: int = 6, sizes: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Features of `sizes` sizes on each of so many occasions, in an order that is drawn; and which occasion it was."""
    draws = np.random.default_rng(2)
    grows, when = draws.permutation(np.array([(1.3**n, k) for n in range(sizes) for k in range(occasions)])).T
    return np.stack([np.ones(len(grows)), grows], axis=1), when


def test_the_ceiling_is_what_noise_leaves_to_explain() -> None:
    x, _ = repeated(occasions=40, sizes=8)
    truth = x @ np.array([500.0, 100.0])
    seen = truth + np.random.default_rng(3).normal(0, 100, size=len(x))
    judged = quality(x, seen)
    allowed = 1 - 100**2 / seen.var()
    assert judged.ceiling == pytest.approx(allowed, abs=0.05)
    assert judged.r2 == pytest.approx(allowed, abs=0.05)


def test_a_fit_that_misses_the_shape_is_below_the_ceiling() -> None:
    """What the costs cannot say is not noise."""
    x, _ = repeated()
    draws = np.random.default_rng(3).normal(0, 1, size=len(x))
    judged = quality(x, 1_000 + 500 * np.sin(np.log(x[:, 1])) + draws)
    assert judged.r2 < 0.5 and judged.ceiling is not None and judged.ceiling > 0.99


def test_what_disturbs_a_whole_occasion_is_noise() -> None:
    x, when = repeated(occasions=8, sizes=8)
    x, when = np.repeat(x, 5, axis=0), np.repeat(when, 5)
    slowed = np.random.default_rng(3).uniform(0.5, 1.5, size=8)[when.astype(int)]
    seen = slowed * (x @ np.array([500.0, 100.0]))
    judged = quality(x, seen, occasions=when)
    assert judged.ceiling is not None and judged.ceiling < 0.95
    assert judged.r2 == pytest.approx(judged.ceiling, abs=0.1)


def test_without_repeats_there_is_no_ceiling() -> None:
    x = np.stack([np.ones(40), 1.5 ** np.arange(40)], axis=1)
    assert quality(x, x @ np.array([5.0, 1.0])).ceiling is None
    x, _ = repeated()
    assert quality(x, x @ np.array([5.0, 1.0]), occasions=np.zeros(len(x))).ceiling is None
