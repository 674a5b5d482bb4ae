"""Stretches of time, and how much of another stretch they cover."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from aegis.telemetry.spans import Span


class Covered:
    """The union of half-open intervals `[start_ns, stop_ns)`."""

    def __init__(self, intervals: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(intervals):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], stop)
            elif start < stop:
                self._starts.append(start)
                self._stops.append(stop)
        self._before = [0]  # the length before each interval
        for start, stop in zip(self._starts, self._stops, strict=True):
            self._before.append(self._before[-1] + stop - start)

    @property
    def total_ns(self) -> int:
        return self._before[-1]

    def within(self, start_ns: int, stop_ns: int) -> int:
        """The covered part of `[start_ns, stop_ns)`."""
        return self._until(stop_ns) - self._until(start_ns) if start_ns < stop_ns else 0

    def _until(self, at_ns: int) -> int:
        index = bisect_right(self._starts, at_ns)
        if index == 0:
            return 0
        return self._before[index - 1] + min(at_ns, self._stops[index - 1]) - self._starts[index - 1]


def covered(spans: Iterable[Span]) -> Covered:
    return Covered((span.start_ns, span.stop_ns) for span in spans)


def edges(start_ns: int, stop_ns: int, bins: int) -> NDArray[np.int64]:
    """The edges of `bins` even stretches; shape [bins + 1]."""
    return np.linspace(start_ns, max(stop_ns, start_ns + bins), bins + 1).astype(np.int64)


def dealt(spans: Iterable[Span], amounts: Iterable[float], at_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each span's amount, dealt evenly to the time it took; summed up for each bin between two of `at_ns`."""
    spans = list(spans)
    start = np.array([span.start_ns for span in spans], dtype=np.float64)
    length = np.maximum(np.array([span.stop_ns for span in spans], dtype=np.float64) - start, 1.0)
    amount = np.array(list(amounts), dtype=np.float64)
    until = [float(np.clip((at - start) / length, 0.0, 1.0) @ amount) for at in at_ns]
    return np.diff(np.array(until))
