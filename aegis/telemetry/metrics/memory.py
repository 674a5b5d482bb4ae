"""The node's memory as metrics: its devices, its model cache, and what is kept of the KV of requests that have
ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aegis.core.model import IMAGE_EXTENT_BYTES
from memory.image_cache import Counters
from memory.machines_kv import MachinesKv
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


_COUNTED = {
    "prompts": "Prompts that were looked up",
    "hits": "Prompts whose beginning was kept",
    "hit_tokens": "Tokens of these beginnings",
    "kept_blocks": "Blocks of KV that were kept",
    "evicted_blocks": "Blocks that were given up for what was needed more",
    "stale": "Hits that were given up before they were copied",
}


class PrefixMetrics(Collector):
    """`aegis:prefix_bytes`, `aegis:prefix_slabs` and, per counter x, `aegis:prefix_x_total`; one for the node."""

    def __init__(self, hosts: MachinesKv) -> None:
        self._hosts = hosts

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        nbytes, slabs = self._hosts.kept_bytes, self._hosts.kept
        yield GaugeMetricFamily("aegis:prefix_bytes", "KV of requests that have ended, kept", value=nbytes)
        yield GaugeMetricFamily("aegis:prefix_slabs", "Slabs of host memory it lies in", value=slabs)
        for name, value in asdict(self._hosts.counters).items():
            yield CounterMetricFamily(f"aegis:prefix_{name}", f"{_COUNTED[name]}, since the start", value=value)
