"""Metrics of several proxies as those of one server: a registry taken down as numbers, and added up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from aegis.telemetry.attainment import DUE, MET, RATIO

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


def exposition(scrapes: Iterable[Iterable[Family]]) -> bytes:
    """Their sum as `/metrics` shows it. What several have is of the same kind, and may be added up."""
    registry = CollectorRegistry()
    registry.register(_Sum(scrapes))
    return generate_latest(registry)


class _Sum(Collector):
    def __init__(self, scrapes: Iterable[Iterable[Family]]) -> None:
        self._heads: dict[str, Family] = {}
        self._values: dict[str, dict[tuple[str, Labels], float]] = {}
        for families in scrapes:
            for family in families:
                self._add(family)
        for (_, labels), due in self._values.get(DUE, {}).items():  # a share cannot be added up
            met = self._values[MET][(MET + "_total", labels)]
            self._values[RATIO][(RATIO, labels)] = met / due if due else 1.0

    def _add(self, family: Family) -> None:
        self._heads.setdefault(family.name, family)
        values = self._values.setdefault(family.name, {})
        for name, labels, value in family.samples:
            values[(name, labels)] = values.get((name, labels), 0.0) + value

    def collect(self) -> Iterator[Metric]:
        for head in self._heads.values():
            metric = Metric(head.name, head.documentation, head.kind)
            for (name, labels), value in self._values[head.name].items():
                metric.add_sample(name, dict(labels), value)
            yield metric
