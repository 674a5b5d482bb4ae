"""Metrics of the KV that the node keeps of requests that have ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from memory.machines_kv import MachinesKv

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
