"""The work and the decisions of instances, added up as metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from aegis.core.clock import NS_PER_S
from aegis.core.decision import Decision, DecisionKind
from aegis.core.ids import InstanceId
from aegis.telemetry.spans import Span, SpanKind

_Kind = TypeVar("_Kind", SpanKind, DecisionKind)


class WorkMetrics(Collector):
    """`aegis:instance_work_seconds_total{instance, kind}` and, of what is copied, `aegis:instance_copied_bytes_total`,
    by the kinds of spans, which may overlap; a run on a lane counts with its share of the device.
    `aegis:decisions_total{instance, kind}` of what instances decided, where that is explained."""

    def __init__(self) -> None:
        self._work_ns: defaultdict[tuple[InstanceId, SpanKind], int] = defaultdict(int)
        self._copied: defaultdict[tuple[InstanceId, SpanKind], int] = defaultdict(int)
        self._decisions: defaultdict[tuple[InstanceId, DecisionKind], int] = defaultdict(int)

    def did(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._work_ns[span.instance, span.kind] += span.device_ns
            if span.nbytes and span.kind is not SpanKind.SWITCH:  # whose bytes are those of its load
                self._copied[span.instance, span.kind] += span.nbytes

    def worked_ns(self, instance: InstanceId, *kinds: SpanKind) -> int:
        """The time that the instance has worked at such things, in all."""
        return sum(self._work_ns[instance, kind] for kind in kinds)

    def decided(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self._decisions[decision.instance, decision.kind] += 1

    def removed(self, instance: InstanceId) -> None:
        """There is none of that name any more, nor will there be."""
        _forget(self._work_ns, instance)
        _forget(self._copied, instance)
        _forget(self._decisions, instance)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        labels = ["instance", "kind"]
        work = CounterMetricFamily("aegis:instance_work_seconds", "Time spent, by what on", labels=labels)
        copied = CounterMetricFamily("aegis:instance_copied_bytes", "Copied over the link to the host", labels=labels)
        decisions = CounterMetricFamily("aegis:decisions", "Decisions that were explained", labels=labels)
        for key, lasted_ns in sorted(dict(self._work_ns).items()):
            work.add_metric(key, lasted_ns / NS_PER_S)
        for key, nbytes in sorted(dict(self._copied).items()):
            copied.add_metric(key, nbytes)
        for (instance, kind), count in sorted(dict(self._decisions).items()):
            decisions.add_metric((instance, kind), count)
        yield from (work, copied, decisions)


def _forget(counts: dict[tuple[InstanceId, _Kind], int], instance: InstanceId) -> None:
    for key in [key for key in counts if key[0] == instance]:
        del counts[key]
