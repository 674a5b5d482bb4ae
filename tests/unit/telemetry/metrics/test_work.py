"""Work is added up by instance and kind."""

from __future__ import annotations

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from aegis.core.clock import NS_PER_S
from aegis.core.decision import Decision, DecisionKind, Why
from aegis.core.ids import InstanceId, ModelId
from aegis.telemetry.metrics.work import WorkMetrics
from aegis.telemetry.spans import Span, SpanKind

I, M = InstanceId("mixed-0"), ModelId("m")  # noqa: E741


def span(kind: SpanKind, seconds: int, nbytes: int = 0) -> Span:
    return Span(I, kind, M, NS_PER_S, (1 + seconds) * NS_PER_S, nbytes=nbytes)


def test_time_bytes_and_decisions() -> None:
    work, registry = WorkMetrics(), CollectorRegistry()
    registry.register(work)
    work.did([span(SpanKind.DECODE, 2), span(SpanKind.LOAD, 1, 10), span(SpanKind.SWITCH, 1, 10)])
    work.did([span(SpanKind.DECODE, 3), span(SpanKind.LOAD, 1, 5)])
    work.decided([Decision(0, I, DecisionKind.EVICT, M, (), "m leaves", Why("needed late"))] * 2)

    def value(name: str, kind: str) -> float | None:
        return registry.get_sample_value(f"aegis:{name}_total", {"instance": "mixed-0", "kind": kind})

    assert value("instance_work_seconds", "decode") == 5
    assert value("instance_work_seconds", "switch") == 1
    assert value("instance_copied_bytes", "load") == 15
    assert value("instance_copied_bytes", "switch") is None
    assert value("decisions", "evict") == 2


def test_a_run_on_a_lane_is_work_of_a_part_of_the_device() -> None:
    work = WorkMetrics()
    work.did([replace(span(SpanKind.DECODE, 10), share=400), replace(span(SpanKind.PREFILL, 10), lane=1, share=600)])
    assert work.worked_ns(I, SpanKind.DECODE) == 4 * NS_PER_S
    assert work.worked_ns(I, SpanKind.DECODE, SpanKind.PREFILL) == 10 * NS_PER_S
