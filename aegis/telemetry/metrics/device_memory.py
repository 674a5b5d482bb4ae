"""The devices' memory as metrics: what is free, what each instance holds of it and what it may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from memory.page_arbiter import PageArbiter


class DeviceMemoryMetrics(Collector):
    """`aegis:device_memory_free_bytes{device}`, `aegis:device_memory_held_bytes{instance}` and, the device's size where
    none was set, `aegis:device_memory_limit_bytes{instance}`."""

    def __init__(self, arbiters: Callable[[], Sequence[PageArbiter]], page_bytes: int) -> None:
        self._arbiters = arbiters
        self._page_bytes = page_bytes

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        free = GaugeMetricFamily("aegis:device_memory_free_bytes", "Device memory nobody holds", labels=["device"])
        held = GaugeMetricFamily("aegis:device_memory_held_bytes", "Device memory held", labels=["instance"])
        limit = GaugeMetricFamily("aegis:device_memory_limit_bytes", "Device memory at most", labels=["instance"])
        for ordinal, arbiter in enumerate(self._arbiters()):
            free.add_metric([str(ordinal)], arbiter.free * self._page_bytes)
            for instance, use in arbiter.use().items():
                held.add_metric([instance], use.held * self._page_bytes)
                limit.add_metric([instance], use.limit * self._page_bytes)
        yield from (free, held, limit)
