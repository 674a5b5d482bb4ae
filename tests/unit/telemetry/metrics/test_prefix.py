"""What is kept, as metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from aegis.core.ids import MachineId
from aegis.telemetry.metrics.prefix import PrefixMetrics
from memory.machines_kv import MachinesKv
from tests.live.metrics import Metrics


def test_all_that_is_counted_is_told() -> None:
    hosts, registry = MachinesKv(1 << 21), CollectorRegistry()
    registry.register(PrefixMetrics(hosts))
    hosts.open(MachineId("here"), 2)
    counted = hosts.counters
    counted.hits, counted.hit_tokens, counted.evicted_blocks = 2, 64, 5
    told = Metrics(generate_latest(registry).decode())
    assert [told.total(f"prefix_{name}") for name in ("hits_total", "hit_tokens_total", "bytes")] == [2, 64, 0]
    assert told.total("prefix_evicted_blocks_total") == 5 and told.total("prefix_slabs") == 0
