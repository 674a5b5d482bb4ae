"""The node's model cache as metrics: extents by what they hold, and how often images came and went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aegis.core.model import IMAGE_EXTENT_BYTES
from memory.image_cache import Counters


class ModelCacheMetrics(Collector):
    """`aegis:model_cache_bytes{state}` and, per counter x, `aegis:model_cache_x_total`; one for the node."""

    def __init__(self, counters: Callable[[], Counters], accounts: Callable[[], dict[str, int]]) -> None:
        self._counters = counters
        self._accounts = accounts

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        held = GaugeMetricFamily("aegis:model_cache_bytes", "Model cache, by what it holds", labels=["state"])
        for state, extents in self._accounts().items():
            held.add_metric([state], extents * IMAGE_EXTENT_BYTES)
        yield held
        for name, value in asdict(self._counters()).items():
            words = name.replace("_", " ")
            yield CounterMetricFamily(
                f"aegis:model_cache_{name}", f"Model cache: {words}, since the start", value=value
            )
