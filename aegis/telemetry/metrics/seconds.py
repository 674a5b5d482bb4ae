"""Histograms of seconds by one label. prometheus_client's take four times as long to collect, and those who serve wait
meanwhile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString


class Seconds:
    """What was observed of one label. `labels` are those of each bucket."""

    __slots__ = ("_bounds", "_counts", "_labels", "_own", "_total")

    def __init__(self, own: dict[str, str], bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._own = own
        self._labels = [own | {"le": str(floatToGoString(bound))} for bound in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def samples(self, name: str) -> Iterator[Sample]:
        up_to = list(accumulate(self._counts))
        bucket = f"{name}_bucket"
        for labels, count in zip(self._labels, up_to, strict=True):
            yield Sample(bucket, labels, count)
        yield Sample(f"{name}_count", self._own, up_to[-1])
        yield Sample(f"{name}_sum", self._own, self._total)


class SecondsByLabel(Collector):
    """A histogram for each value of `label`, with buckets up to each of `bounds`, inclusive, which ascend."""

    def __init__(
        self, name: str, documentation: str, label: str, bounds: tuple[float, ...], *, registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation, self._label, self._bounds = name, documentation, label, bounds
        self._of: dict[str, Seconds] = {}
        registry.register(self)

    def of(self, value: str) -> Seconds:
        found = self._of.get(value)
        if found is None:
            found = self._of[value] = Seconds({self._label: value}, self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        metric = Metric(self._name, self._documentation, "histogram")
        metric.samples = [sample for each in list(self._of.values()) for sample in each.samples(self._name)]
        yield metric
