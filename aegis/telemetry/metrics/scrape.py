"""Metrics of several proxies as those of one server: a registry taken down as numbers, and added up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, structs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from aegis.telemetry.metrics.slo_attainment import DUE, MET, RATIO

Labels = tuple[tuple[str, str], ...]


class Family(Struct, frozen=True, array_like=True):
    """One metric of all labels."""

    name: str
    documentation: str
    kind: str
    samples: tuple[tuple[str, Labels, float], ...]


def scrape(registry: CollectorRegistry) -> tuple[Family, ...]:
    """All its metrics as they stand."""
    return tuple(
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            tuple((sample.name, tuple(sample.labels.items()), sample.value) for sample in metric.samples),
        )
        for metric in registry.collect()
    )


def lasting(families: Iterable[Family]) -> tuple[Family, ...]:
    """The metrics that still count when their process is gone."""
    return tuple(family for family in families if family.kind in ("counter", "histogram") or family.name == RATIO)


def total(scrapes: Iterable[Iterable[Family]]) -> tuple[Family, ...]:
    """Their sum. What several have is of the same kind, and may be added up."""
    heads: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, Labels], float]] = {}
    for family in [family for families in scrapes for family in families]:
        heads.setdefault(family.name, family)
        sums = values.setdefault(family.name, {})
        for name, labels, value in family.samples:
            sums[(name, labels)] = sums.get((name, labels), 0.0) + value
    for (_, labels), due in values.get(DUE, {}).items():  # a share cannot be added up
        values[RATIO][(RATIO, labels)] = values[MET][(MET + "_total", labels)] / due if due else 1.0
    return tuple(
        structs.replace(head, samples=tuple((*key, value) for key, value in values[head.name].items()))
        for head in heads.values()
    )


def exposition(families: Iterable[Family]) -> bytes:
    """As `/metrics` shows them."""
    registry = CollectorRegistry()
    registry.register(_Scraped(families))
    return generate_latest(registry)


class _Scraped(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric
