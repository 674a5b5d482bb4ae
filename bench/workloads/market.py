"""A market of models: a few popular ones, many that are rarely called, each in bursts with idle time between.

Calls of a model come in bursts. Bursts begin as a Poisson process and may overlap; a burst is a geometric number of
calls with exponential gaps: a Poisson cluster process (Bartlett, Lewis). Bursts of different models are independent, so
the set of models that are active together shifts all the time. The defaults lie within what is published of real
markets: four production traces (Prism, §3.1 and appendix A.1), and the mean rate per model of a fifth (Aegaeon, §3.1).
`alpha=3` among 80 models has the much longer tail of a sixth (Aegaeon, §2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import fsum

from aegis.core.rng import Stream
from bench.workloads.draws import exp, exponential, ln

AEGAEON_RPS = 0.037
"""The mean rate per model of a production market (Aegaeon, §3.1)."""


@dataclass(frozen=True, slots=True)
class Market:
    """Zipf popularity, each model called in bursts with idle time between; m000 is the most popular."""

    models: int = 80
    rps: float = AEGAEON_RPS
    duration_s: float = 600.0
    alpha: float = 0.8
    group: float = 20.0
    gap_s: float = 15.0

    def times_ns(self, model: int, draws: Stream) -> Iterator[int]:
        """The arrivals of one model in [0, duration), in order within each burst only."""
        stop_ns, gap_ns = self.duration_s * 1e9, self.gap_s * 1e9
        rps = self.rps * self.models * popularity(self.models, self.alpha)[model]
        mean_between_ns = 1e9 * self.group / rps
        # Bursts under way at 0 have no memory: a Poisson number of them, each a gap away from its next call.
        busy, under_way = exponential(draws), (self.group - 1) * gap_ns / mean_between_ns
        while busy < under_way:
            yield from self._burst(round(gap_ns * exponential(draws)), draws)
            busy += exponential(draws)
        start_ns = round(mean_between_ns * exponential(draws))
        while start_ns < stop_ns:
            yield from self._burst(start_ns, draws)
            start_ns += round(mean_between_ns * exponential(draws))

    def _burst(self, at_ns: int, draws: Stream) -> Iterator[int]:
        stop_ns, gap_ns = self.duration_s * 1e9, self.gap_s * 1e9
        while at_ns < stop_ns:
            yield at_ns
            if draws.uniform() * self.group < 1:
                return
            at_ns += round(gap_ns * exponential(draws))


@cache
def popularity(models: int, alpha: float) -> tuple[float, ...]:
    """Each model's share of all calls: 1 / rank^alpha, scaled to the sum 1 (Zipf)."""
    weights = [exp(-alpha * ln(rank)) for rank in range(1, models + 1)]
    total = fsum(weights)  # exact: what `sum` rounds depends on the version of Python
    return tuple(weight / total for weight in weights)
