"""When a model is called: arrivals as a Poisson process, with gaps from a Gamma distribution, and as the generator of
the public Aegaeon artifact draws them. Models are independent of one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aegis.core.rng import Stream
from bench.workloads.draws import exponential, gamma


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
