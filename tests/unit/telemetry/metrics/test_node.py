"""The metrics of a node about its instances, as Prometheus sees them."""

from __future__ import annotations

from prometheus_client import generate_latest

from aegis.core.clock import NS_PER_S
from aegis.core.decision import Decision, DecisionKind, Why
from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import SlabsOfShape, SwitchDone, Telemetry
from aegis.telemetry.metrics.node import NodeMetrics
from aegis.telemetry.spans import Span, SpanKind

M = ModelId("m")
DECODE = InstanceId("decode-0")


def value(metrics: NodeMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"aegis:{name}", labels)


def test_switches_are_timed_by_phase() -> None:
    metrics = NodeMetrics()
    metrics.switch(SwitchDone(M, True, 0, 2 * NS_PER_S, 1 * NS_PER_S, 5))
    metrics.switch(SwitchDone(M, False, 0, 4 * NS_PER_S, 0, 5))
    assert value(metrics, "model_switch_seconds_sum", phase="copy") == 6
    assert value(metrics, "model_switch_seconds_sum", phase="kv") == 1
    assert value(metrics, "model_switch_seconds_count", phase="make_room") == 2
    assert value(metrics, "model_switches_total", model_name="m", prefetched="true") == 1
    assert value(metrics, "model_switches_total", model_name="m", prefetched="false") == 1


def report(accounts: dict[str, int] | None = None, **counters: int) -> Telemetry:
    return Telemetry(M, (M,), 3, 2, {f"{name}_total": count for name, count in counters.items()}, accounts or {})


def test_counters_of_an_instance_go_on_over_its_restarts() -> None:
    metrics = NodeMetrics()
    metrics.telemetry(DECODE, report(swap_in_bytes=10, swap_out_bytes=1, steps=5, engine_initialisations=1))
    metrics.telemetry(DECODE, report(swap_in_bytes=30, swap_out_bytes=1, steps=7, engine_initialisations=1))
    metrics.ended(DECODE, requested=False)
    metrics.telemetry(DECODE, report(swap_in_bytes=40, steps=1, engine_initialisations=1))
    assert value(metrics, "kv_swap_bytes_total", instance="decode-0", direction="in") == 70
    assert value(metrics, "kv_swap_bytes_total", instance="decode-0", direction="out") == 1
    assert value(metrics, "instance_steps_total", instance="decode-0") == 8
    assert value(metrics, "engine_initialisations_total", instance="decode-0") == 2
    assert value(metrics, "instance_restarts_total", instance="decode-0") == 1


def test_an_end_that_was_requested_is_no_restart() -> None:
    metrics = NodeMetrics()
    metrics.telemetry(DECODE, report(steps=5))
    metrics.ended(DECODE, requested=True)
    metrics.telemetry(DECODE, report(steps=5))
    assert value(metrics, "instance_restarts_total", instance="decode-0") == 0
    assert value(metrics, "instance_steps_total", instance="decode-0") == 10


def test_nothing_is_told_of_an_instance_that_was_removed() -> None:
    """Names are not used again, so that a pool that grows and shrinks would have ever more metrics."""
    metrics = NodeMetrics()
    metrics.up(DECODE, True)
    metrics.telemetry(DECODE, report({"device_pages_free": 5}, steps=5))
    metrics.work.did([Span(DECODE, SpanKind.LOAD, M, 0, NS_PER_S, nbytes=5)])
    metrics.work.decided([Decision(0, DECODE, DecisionKind.EVICT, M, (), "m leaves", Why("needed late"))])
    assert "decode-0" in generate_latest(metrics.registry).decode()
    metrics.ended(DECODE, requested=True)
    metrics.removed(DECODE)
    assert "decode-0" not in generate_latest(metrics.registry).decode()


def test_gauges_of_an_instance_are_those_of_now() -> None:
    metrics = NodeMetrics()
    metrics.up(DECODE, True)
    metrics.telemetry(DECODE, report({"device_pages_free": 5}))
    metrics.telemetry(DECODE, report({"device_pages_free": 4}))
    assert value(metrics, "instance_up", instance="decode-0") == 1
    assert value(metrics, "memory_device_pages_free", instance="decode-0") == 4
    assert value(metrics, "instance_queued", instance="decode-0") == 3
    assert value(metrics, "instance_running", instance="decode-0") == 2
    metrics.ended(DECODE, requested=False)
    assert value(metrics, "instance_up", instance="decode-0") == 0
    assert value(metrics, "memory_device_pages_free", instance="decode-0") is None


def test_fragmentation_is_told_by_region() -> None:
    metrics = NodeMetrics()
    slabs = SlabsOfShape(
        "device",
        (M,),
        slab_bytes=100,
        block_bytes=30,
        slabs=2,
        free_blocks=3,
        reserved_blocks=1,
        used_blocks=1,
        moving_blocks=1,
    )
    metrics.telemetry(DECODE, Telemetry(M, (M,), 0, 0, {}, {}, shapes=(slabs,)))
    ratio = "kv_slab_fragmentation_ratio"
    assert value(metrics, ratio, instance="decode-0", region="device") == 1 - 90 / 200
    assert value(metrics, ratio, instance="decode-0", region="host") == 0
    metrics.ended(DECODE, requested=False)
    assert value(metrics, ratio, instance="decode-0", region="device") is None


def test_everything_is_exposed_in_prometheus_text_once() -> None:
    metrics = NodeMetrics()
    metrics.telemetry(DECODE, report({"device_pages": 1}, steps=1))
    metrics.telemetry(InstanceId("prefill-0"), report({"device_pages": 2}, steps=1))
    lines = generate_latest(metrics.registry).decode().splitlines()
    samples = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    assert len([line for line in lines if line.startswith("# TYPE aegis:memory_device_pages ")]) == 1
    assert all(sample.startswith(("aegis:", "process_")) for sample in samples)


def test_slabs_and_blocks_are_told_by_shape() -> None:
    metrics = NodeMetrics()
    shape = SlabsOfShape(
        "device", (M,), 1000, 100, slabs=3, free_blocks=20, reserved_blocks=1, used_blocks=7, moving_blocks=2
    )
    metrics.telemetry(DECODE, Telemetry(M, (M,), 0, 0, {}, {}, shapes=(shape,)))
    labels = {"instance": "decode-0", "region": "device", "block_bytes": "100"}
    assert value(metrics, "kv_slab_bytes", **labels) == 3000
    assert [value(metrics, "kv_blocks", state=state, **labels) for state in ("free", "used", "moving")] == [20, 7, 2]
    metrics.ended(DECODE, requested=False)
    assert value(metrics, "kv_slab_bytes", **labels) is None
