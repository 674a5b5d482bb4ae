from prometheus_client import CollectorRegistry

from aegis.core.ids import InstanceId
from aegis.core.messages import NeedPages
from aegis.telemetry.metrics.device_memory import DeviceMemoryMetrics
from memory.page_arbiter import PageArbiter


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
