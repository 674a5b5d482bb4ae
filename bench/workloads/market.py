"""A market of models: a few popular ones, many that are rarely called, each in bursts with idle time between.

Calls of a model come in bursts. Bursts begin as a Poisson process and may overlap; a burst is a geometric number of
calls with exponential gaps: a Poisson cluster process (Bartlett, Lewis). Bursts of different models are independent, so
the set of models that are active together shifts all the time. The defaults lie within what is published of real
markets:

* `PRISM_*`: four production traces (Prism, §3.1 and appendix A.1). A model is active for 120 s after a call; a switch
  is a change of the set of active models; an idle interval is a gap of more than 10 s between two calls of a model; the
  CV is that of calls per minute; the tail is from the first version of the paper, §3.1.
* `AEGAEON_RPS`: the mean rate per model of a production market (Aegaeon, §3.1). `AEGAEON_TAIL` is the much longer tail
  of another (§2.2): `alpha=3` has it among 80 models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import fsum

from aegis.core.rng import Stream
from bench.workloads.draws import exp, exponential, ln

PRISM_MODELS = (24, 129)
PRISM_ACTIVE_WINDOW_S = 120
PRISM_ACTIVE_SHARE = (0.23, 0.50)  # of the models, on average
PRISM_SWITCHES_PER_HOUR = (54, 766)
PRISM_IDLE_S = 10
PRISM_IDLE_INTERVALS_PER_HOUR = (40, 100)  # of many models
PRISM_CV_MIN = 1.0  # of many models
PRISM_TAIL = (0.60, 0.25)  # this share of the models gets that share of the calls
AEGAEON_RPS = 0.037
AEGAEON_TAIL = (0.941, 0.0135)


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
