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
"""A fit is judged by so many others: each to all but every so many-th observation, and by those."""

_OUTLIER = 5.0  # times what is usual: what takes longer counts as if it had taken so long
_ROUNDS = 12
_AS_MUCH = 1e-10  # of what is explained: by so much less, fewer costs explain as much
_SUBSETS_OF = 8  # features at most: of more there are too many subsets to try each
_PER_OCTAVE = 4  # features are alike where they differ by less than 19 %


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a fit, on what it has not seen. `worst` and `typical` (the median) are relative errors, `bias` that of all
    together, below 0 where too little was expected. `ceiling` is about the best R² that any function of the features
    could have; None: no two observations are alike."""

    observations: int
    r2: float
    worst: float
    typical: float
    ceiling: float | None = None
    bias: float = 0.0


def fit(features: Matrix, durations: Vector) -> Vector:
    """Non-negative `c` with `features @ c` about `durations`; features are `(observations, costs)`.

    Longer durations vary more, in proportion: each counts by the inverse of what is expected of it. So what the fit
    says of all observations together is what they took, which is what the throughput of a simulation depends on. A
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


def quality(
    features: Matrix, durations: Vector, counts: Vector | None = None, occasions: Vector | None = None
) -> Quality:
    """Of each observation by a fit that has not seen it; R² is 0 where there is nothing to explain.

    `counts`: of how many parts each duration is the sum; R² is then that of parts, each as long as the mean of its
    duration. `occasions` number when each was made: what disturbs one observation disturbs others of the same occasion.
    None: each has its own.
    """
    if len(durations) < HELD_OUT:
        return Quality(0, 0.0, 0.0, 0.0)
    parts = np.ones(len(durations)) if counts is None else counts
    expected, fold = np.empty(len(durations)), np.arange(len(durations)) % HELD_OUT
    for held in (fold == number for number in range(HELD_OUT)):
        expected[held] = features[held] @ fit(features[~held], durations[~held])
    noise = _noise((durations - expected) / parts, features / parts[:, None], occasions)
    return judged(expected, durations, parts, noise)


def judged(expected: Vector, durations: Vector, parts: Vector, noise: Vector | None = None) -> Quality:
    """Of predictions, whoever made them. `noise` of each: what no prediction could have known, squared, of a part; NaN
    where nobody can tell. R² is 0 where there is nothing to explain."""
    errors = np.abs(expected / durations - 1)
    left, seen = (durations - expected) / parts, durations / parts
    spread = _mean((seen - _mean(seen, parts)) ** 2, parts)
    r2 = 1 - _mean(left**2, parts) / spread if spread else 0.0
    ceiling = None
    if noise is not None:
        repeated = ~np.isnan(noise)
        ceiling = 1 - _mean(noise[repeated], parts[repeated]) / spread if spread and repeated.any() else None
    bias = float(expected.sum() / durations.sum()) - 1
    return Quality(len(seen), r2, float(errors.max()), float(np.median(errors)), ceiling, bias)


def _mean(values: Vector, weights: Vector) -> float:
    return float(np.average(values, weights=weights))


def _noise(left: Vector, features: Matrix, occasions: Vector | None) -> Vector:
    """The squared distance of each observation from those with features like its own on other occasions; NaN if there
    were none. No function of the features explains it: it is the pure error of a test for lack of fit.

    The residuals that a fit `left` are compared, not the observations, so that small differences between features do
    not matter. The mean of the k - 1 other occasions has an error as well, which is taken out as if all the noise were
    between occasions; in so far as it is not, this is too little, and the ceiling too high rather than too low.
    """
    near = np.rint(_PER_OCTAVE * np.log2(np.maximum(features, 1.0)))
    when = np.arange(len(left)) if occasions is None else occasions
    cells = np.unique(near, axis=0, return_inverse=True)[1].ravel()
    pairs, own = np.unique(np.stack([cells, when], axis=1), axis=0, return_inverse=True)
    own, whose = own.ravel(), pairs[:, 0].astype(np.intp)
    means = np.bincount(own, left) / np.bincount(own)
    others = np.bincount(whose)[cells] - 1.0
    others[others == 0] = np.nan
    elsewhere = (np.bincount(whose, means)[cells] - means[own]) / others
    result: Vector = (left - elsewhere) ** 2 * others / (others + 1)
    return result


def usual_mean(durations: Sequence[float]) -> float:
    """The mean, hiccups shortened; 0 of none."""
    if not durations:
        return 0.0
    seen: Any = np.asarray(durations, dtype=np.float64)
    return float(np.minimum(seen, _OUTLIER * max(float(np.median(seen)), 1.0)).mean())


def _weighted(features: Matrix, durations: Vector, deviations: Vector) -> Vector:
    """Non-negative least squares of `(features @ c - durations) / deviations`. Of few features every subset is tried,
    and of those that explain as much, as where two features are always the same, the smallest and first one is
    taken."""
    rows, aims = features / deviations[:, None], durations / deviations
    products, targets = rows.T @ rows, rows.T @ aims
    count = features.shape[1]
    whole, explained = _solved(products, targets, list(range(count)))
    without = max((_solved(products, targets, chosen)[1] for chosen in _subsets(count, count - 1)), default=0.0)
    if (whole >= 0).all() and explained > max(without, 0.0) * (1 + _AS_MUCH):
        return whole  # no subset explains more than one of those that leave out one feature
    if count > _SUBSETS_OF:
        return _active_set(products, targets)
    best: Vector = np.zeros(count)
    most = 0.0  # of the squares, explained
    for chosen in (chosen for size in range(1, count + 1) for chosen in _subsets(count, size)):
        found, explained = _solved(products, targets, chosen)
        if (found >= 0).all() and explained > most * (1 + _AS_MUCH):
            most, best = explained, np.zeros(count)
            best[chosen] = found
    return best


def _active_set(products: Matrix, targets: Vector) -> Vector:
    """Non-negative least squares, feature by feature (Lawson and Hanson, Solving Least Squares Problems, ch. 23)."""
    costs: Vector = np.zeros(len(targets))
    taken: list[int] = []
    for _ in range(3 * len(targets)):
        gains = targets - products @ costs
        gains[taken] = 0.0
        best = int(np.argmax(gains))
        if gains[best] <= _AS_MUCH * abs(targets[best]):
            break
        taken.append(best)
        while (found := _solved(products, targets, taken)[0]).min() < 0:
            before = costs[taken]
            below = found < 0
            share = float((before[below] / np.maximum(before[below] - found[below], 1e-300)).min())
            kept = before + share * (found - before)
            kept[below & (kept <= _AS_MUCH * kept.max())] = 0.0
            costs[taken] = kept
            left = [each for each, cost in zip(taken, kept, strict=True) if cost > 0]
            costs[[each for each in taken if each not in left]] = 0.0
            taken = left
            if not taken:
                return costs
        costs[taken] = found
    return costs


def _subsets(count: int, size: int) -> list[list[int]]:
    """The sets of `size` out of so many features, but for the empty one."""
    return [list(chosen) for chosen in combinations(range(count), size) if chosen]


def _solved(products: Matrix, targets: Vector, chosen: list[int]) -> tuple[Vector, float]:
    """Costs of the chosen features alone, of either sign, and what of the squares they explain."""
    own, aimed = products[np.ix_(chosen, chosen)], targets[chosen]
    found = np.linalg.lstsq(own, aimed, rcond=None)[0]
    return found.astype(np.float64, copy=False), float(2 * found @ aimed - found @ own @ found)
