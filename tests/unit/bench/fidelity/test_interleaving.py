"""Two workloads by turns, and what a server did taken apart again."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration.telemetry import Telemetry
from bench.fidelity.interleaving import Interleaving, write_trace
from bench.workloads import traces
from bench.workloads.arrival import Arrival

INTERLEAVING = Interleaving(piece_ns=1000, pause_ns=100)
MEASURED, COMPARED = ModelId("measured"), ModelId("compared")
TIMES = st.lists(st.integers(0, 9999), min_size=1)


def arrivals(times: list[int], model: ModelId) -> list[Arrival]:
    return [Arrival(at_ns, model, 3, 4) for at_ns in times]


def recorded(at_ns: int, model: ModelId) -> Record:
    return Record(RequestId(0), model, at_ns, 3, 4, "finished", 4)


@given(TIMES, TIMES, st.integers(0, 10**12), st.integers(0, 49))
def test_what_belongs_to_which_is_known_on_another_clock(
    measured: list[int], compared: list[int], clock_ns: int, late_ns: int
) -> None:
    asked = [
        recorded(each.at_ns, each.model)
        for each in INTERLEAVING.by_turns(arrivals(measured, MEASURED), arrivals(compared, COMPARED))
    ]
    assert len(asked) == len(measured) + len(compared)
    came = [recorded(clock_ns + each.arrival_ns + (late_ns if at else 0), each.model) for at, each in enumerate(asked)]
    spans = [Span(InstanceId("a"), SpanKind.PREFILL, each.model, each.arrival_ns, each.arrival_ns) for each in came]
    sides = INTERLEAVING.split(asked, Telemetry(spans, came))
    for side, model, count in zip(sides, (MEASURED, COMPARED), (len(measured), len(compared)), strict=True):
        assert [each.model for each in side.records] == [each.model for each in side.spans] == [model] * count


def test_pieces_follow_each_other_with_pauses() -> None:
    mixed = INTERLEAVING.by_turns(arrivals([0, 999, 1000], MEASURED), arrivals([0, 1999], COMPARED))
    assert [each.at_ns for each in mixed] == [50, 1049, 1150, 2250, 4349]


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    wanted = arrivals([0, 1, 123_456_789_012, 999_999_999_999], COMPARED)
    write_trace(wanted, tmp_path / "trace.csv")
    assert traces.read(tmp_path / "trace.csv") == wanted
