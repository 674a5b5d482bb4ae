"""Arrivals per model whose gaps are drawn from a Gamma distribution: burstier or more even than Poisson ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aegis.core.rng import Stream
from bench.workloads.draws import gamma


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps between the calls of a model have the coefficient of variation cv; 1 is Poisson, above it are bursts."""

    models: int = 80
    rps: float = 0.1
    duration_s: float = 600.0
    cv: float = 4.0

    def times_ns(self, model: int, draws: Stream) -> Iterator[int]:
        """The arrivals of one model in [0, duration), of a process that has run for ever.

        The time to the first is a uniform part of a gap drawn in proportion to its length (renewal theory); had a gap
        begun at 0, there would be (cv² − 1) / 2 arrivals too many.
        """
        shape = 1 / (self.cv * self.cv)
        stop_ns, scale_ns = self.duration_s * 1e9, 1e9 / (self.rps * shape)
        at_ns = round(scale_ns * gamma(draws, shape + 1) * draws.uniform())
        while at_ns < stop_ns:
            yield at_ns
            at_ns += round(scale_ns * gamma(draws, shape))
