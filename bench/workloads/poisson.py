"""Independent Poisson arrivals per model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aegis.core.rng import Stream
from bench.workloads.draws import exponential


@dataclass(frozen=True, slots=True)
class Poisson:
    """Each model is called at a constant mean rate, independently of the past and of the others."""

    models: int = 80
    rps: float = 0.1
    duration_s: float = 600.0

    def times_ns(self, model: int, draws: Stream) -> Iterator[int]:
        """The arrivals of one model in [0, duration)."""
        stop_ns, mean_gap_ns = self.duration_s * 1e9, 1e9 / self.rps
        at_ns = round(mean_gap_ns * exponential(draws))
        while at_ns < stop_ns:
            yield at_ns
            at_ns += round(mean_gap_ns * exponential(draws))
