"""The percentile of all figures of ours: the nearest rank. (`aegis bench serve` interpolates, as vLLM's does.)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def percentile(ordered: Sequence[int], percent: int) -> int | None:
    """The least of `ordered` that so many per cent are not above. None of nothing."""
    return ordered[rank(len(ordered), percent)] if ordered else None


def percentile_of(values: Iterable[float], percent: int) -> float:
    """The percentile of values that may be in any order; 0 of no values."""
    ordered = sorted(values)
    return ordered[rank(len(ordered), percent)] if ordered else 0.0


def rank(count: int, percent: int) -> int:
    """The place of the percentile among so many."""
    return -(-count * percent // 100) - 1
