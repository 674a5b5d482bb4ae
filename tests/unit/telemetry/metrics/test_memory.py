"""The node's memory as metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from aegis.core.ids import InstanceId, MachineId, ModelId
from aegis.core.messages import NeedPages
from aegis.core.model import IMAGE_EXTENT_BYTES
from aegis.telemetry.metrics.memory import DeviceMemoryMetrics, ModelCacheMetrics, PrefixMetrics
from memory.image_cache import ModelCache
from memory.machines_kv import MachinesKv
from memory.page_arbiter import PageArbiter
from tests.live.metrics import Metrics


def test_devices_are_shown_as_they_are_now() -> None:
    arbiters = [PageArbiter(10, idle_ns=1, patience_ns=1, quantum=1) for _ in range(2)]
    registry = CollectorRegistry()
    registry.register(DeviceMemoryMetrics(lambda: arbiters, 100))
    instance = InstanceId("decode-0")
    arbiters[1].join(instance)
    arbiters[1].ask(instance, NeedPages(4, urgent=True))

    def of_instance(what: str) -> float | None:
        return registry.get_sample_value(f"aegis:device_memory_{what}_bytes", {"instance": instance})

    free = [registry.get_sample_value("aegis:device_memory_free_bytes", {"device": str(i)}) for i in range(2)]
    assert free == [1000, 600]
    assert (of_instance("held"), of_instance("limit")) == (400, 1000)
    arbiters[1].set_limit(instance, 5, command=1, patience_ns=1)
    assert of_instance("limit") == 500
    arbiters[1].lost(instance)
    assert of_instance("held") is None


def test_the_cache_is_shown_as_it_is_now() -> None:
    cache, registry = ModelCache(5), CollectorRegistry()
    registry.register(ModelCacheMetrics(lambda: cache.counters, cache.accounts))
    model = ModelId("m")
    cache.add(model, 3)

    def held(state: str) -> float | None:
        return registry.get_sample_value("aegis:model_cache_bytes", {"state": state})

    assert (held("free"), held("filling"), held("cached")) == (2 * IMAGE_EXTENT_BYTES, 3 * IMAGE_EXTENT_BYTES, 0)
    cache.use(model, 0)
    cache.filled(model)
    cache.use(model, 1)
    assert (held("filling"), held("cached")) == (0, 3 * IMAGE_EXTENT_BYTES)
    counts = [registry.get_sample_value(f"aegis:model_cache_{name}_total") for name in ("hits", "misses", "fills")]
    assert counts == [1, 1, 1]


def test_all_that_is_counted_is_told() -> None:
    hosts, registry = MachinesKv(1 << 21), CollectorRegistry()
    registry.register(PrefixMetrics(hosts))
    hosts.open(MachineId("here"), 2)
    counted = hosts.counters
    counted.hits, counted.hit_tokens, counted.evicted_blocks = 2, 64, 5
    told = Metrics(generate_latest(registry).decode())
    assert [told.total(f"prefix_{name}") for name in ("hits_total", "hit_tokens_total", "bytes")] == [2, 64, 0]
    assert told.total("prefix_evicted_blocks_total") == 5 and told.total("prefix_slabs") == 0
