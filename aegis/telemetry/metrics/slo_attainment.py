"""SLO attainment: the share of tokens on time (Aegaeon §2.1), since the start.

Token i is due at `Slo.due_ns(arrival, i)`. What a failed request still owed counts as missed; what a client cancelled
does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aegis.core.ids import ModelId
from aegis.core.model import Slo

RATIO, MET, DUE = "aegis:slo_attainment_ratio", "aegis:slo_tokens_met", "aegis:slo_tokens"
"""Its metrics: a gauge and the two counters it is made of."""


@dataclass(slots=True)
class Attainment:
    """The attainment of one model."""

    met: int = 0
    tokens: int = 0

    @property
    def ratio(self) -> float:
        return self.met / self.tokens if self.tokens else 1.0

    def saw(self, slo: Slo, arrival_ns: int, first: int, count: int, now_ns: int) -> None:
        """Tokens `[first, first + count)` reached the proxy at `now_ns`."""
        self.tokens += count
        self.met += slo.on_time(arrival_ns, range(first, first + count), now_ns)

    def missed(self, count: int) -> None:
        self.tokens += count


class AttainmentMetrics(Collector):
    """`aegis:slo_attainment_ratio{model_name}` and the two counts it is made of."""

    def __init__(self) -> None:
        self._attainment: dict[ModelId, Attainment] = {}

    def of(self, model: ModelId) -> Attainment:
        return self._attainment.setdefault(model, Attainment())

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        ratio = GaugeMetricFamily(RATIO, "Share of tokens on time", labels=["model_name"])
        met = CounterMetricFamily(MET, "Tokens on time", labels=["model_name"])
        due = CounterMetricFamily(DUE, "Tokens on time, late or never made", labels=["model_name"])
        for model, attainment in sorted(dict(self._attainment).items()):
            ratio.add_metric([model], attainment.ratio)
            met.add_metric([model], attainment.met)
            due.add_metric([model], attainment.tokens)
        yield from (ratio, met, due)
