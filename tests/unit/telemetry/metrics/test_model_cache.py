from prometheus_client import CollectorRegistry

from aegis.core.ids import ModelId
from aegis.core.model import IMAGE_EXTENT_BYTES
from aegis.telemetry.metrics.model_cache import ModelCacheMetrics
from memory.image_cache import ModelCache


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
