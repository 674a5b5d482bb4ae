"""How busy GPUs are, from spans written by hand."""

from __future__ import annotations

from aegis.core.ids import InstanceId, ModelId
from aegis.sim.simulation import Outcome
from aegis.telemetry.spans import Span, SpanKind
from bench.simulate.utilisation import utilisation

S = 1_000_000_000
X, Y = InstanceId("mixed-0"), InstanceId("mixed-1")


def test_runs_count_where_and_when_they_are_and_loads_do_not() -> None:
    spans = [
        Span(X, SpanKind.DECODE, ModelId("a"), 30 * S, 90 * S),
        Span(Y, SpanKind.PREFILL, ModelId("a"), 100 * S, 112 * S),
        Span(Y, SpanKind.LOAD, ModelId("a"), 0, 60 * S),
    ]
    found = utilisation(Outcome([], [], spans, {X: {}, Y: {}}, 120 * S, [], []))
    assert (found.gpus, found.lowest, found.highest, found.mean) == (2, 0.1, 0.5, 0.3)
    assert found.by_minute == (0.25, 0.35)


def test_a_lane_counts_by_its_share() -> None:
    spans = [
        Span(X, SpanKind.DECODE, ModelId("a"), 0, 60 * S, share=300),
        Span(X, SpanKind.PREFILL, ModelId("b"), 0, 60 * S, lane=1, share=700),
    ]
    found = utilisation(Outcome([], [], spans, {X: {}}, 60 * S, [], []))
    assert found.mean == 1.0 and found.by_minute == (1.0,)
