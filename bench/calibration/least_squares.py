"""Fits of durations that are sums of costs, none of them negative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]

HELD_OUT = 5
"""Every so many-th observation is for judging a fit, not for making it."""

_OUTLIER = 5.0  # times what is usual: what takes longer counts as if it had taken so long
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a fit, on what it has not seen. `worst` and `typical` (the median) are relative errors."""

    observations: int
    r2: float
    worst: float
    typical: float


def fit(features: Matrix, durations: Vector) -> Vector:
    """Non-negative `c` with `features @ c` about `durations`; features are `(observations, costs)`.

    Longer durations vary more, in proportion: each counts by the inverse of what is expected of it. So what the fit
    says of all observations together is what they took, which is what the throughput of a simulation hangs on. A
    duration far beyond the usual is a hiccup of the machine, and shortened to `_OUTLIER` times the usual.
    """
    scale = np.maximum(features.max(axis=0), 1e-12)
    scaled, expected = features / scale, np.full(len(durations), durations.mean())
    for _ in range(_ROUNDS):
        shortened = np.minimum(durations, _OUTLIER * expected)
        coefficients = _weighted(scaled, shortened, np.sqrt(expected))
        expected = np.maximum(scaled @ coefficients, 1.0)
    result: Vector = coefficients / scale
    return result


def quality(features: Matrix, durations: Vector, counts: Vector | None = None) -> Quality:
    """Of a fit to the rest on every `HELD_OUT`-th observation; R² is 0 where there is nothing to explain.

    `counts`: of what each duration is the sum; R² is then that of the mean of each.
    """
    held = np.arange(len(durations)) % HELD_OUT == HELD_OUT - 1
    if not held.any() or held.all():
        return Quality(0, 0.0, 0.0, 0.0)
    expected, seen = features[held] @ fit(features[~held], durations[~held]), durations[held]
    errors = np.abs(expected / seen - 1)
    if counts is not None:
        expected, seen = expected / counts[held], seen / counts[held]
    spread = float(((seen - seen.mean()) ** 2).sum())
    r2 = 1 - float(((seen - expected) ** 2).sum()) / spread if spread else 0.0
    return Quality(int(held.sum()), r2, float(errors.max()), float(np.median(errors)))


def usual_mean(durations: Sequence[float]) -> float:
    """The mean, hiccups shortened; 0 of none."""
    if not durations:
        return 0.0
    seen: Any = np.asarray(durations, dtype=np.float64)
    return float(np.minimum(seen, _OUTLIER * max(float(np.median(seen)), 1.0)).mean())


def _weighted(features: Matrix, durations: Vector, deviations: Vector) -> Vector:
    """Non-negative least squares of `(features @ c - durations) / deviations`. Few features: every subset is tried."""
    rows, aims = features / deviations[:, None], durations / deviations
    products, targets = rows.T @ rows, rows.T @ aims
    count = features.shape[1]
    best: Vector = np.zeros(count)
    most = 0.0  # of the squares, explained
    for size in range(count, 0, -1):
        for chosen in map(list, combinations(range(count), size)):
            found = np.linalg.lstsq(products[np.ix_(chosen, chosen)], targets[chosen], rcond=None)[0]
            explained = float(2 * found @ targets[chosen] - found @ products[np.ix_(chosen, chosen)] @ found)
            if (found >= 0).all() and explained > most * (1 + 1e-12):
                most, best = explained, np.zeros(count)
                best[chosen] = found
    return best
