"""Arrivals as the generator of the public Aegaeon artifact draws them, for comparison with its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aegis.core.rng import Stream
from bench.workloads.draws import exponential


@dataclass(frozen=True, slots=True)
class Artifact:
    """Poisson, but each model draws at most int(duration × rps) calls, as the public Aegaeon artifact does.

    A model that has made its draws falls silent before the end: the mean rate is 5 to 15 % below `rps`.
    """

    models: int = 80
    rps: float = 0.1
    duration_s: float = 120.0

    def times_ns(self, model: int, draws: Stream) -> Iterator[int]:
        """The arrivals of one model in [0, duration)."""
        stop_ns, mean_gap_ns = self.duration_s * 1e9, 1e9 / self.rps
        at_ns = 0
        for _ in range(int(self.duration_s * self.rps)):
            at_ns += round(mean_gap_ns * exponential(draws))
            if at_ns >= stop_ns:
                return
            yield at_ns
