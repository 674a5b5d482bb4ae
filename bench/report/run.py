"""A run, as its files tell it, or a server that is running."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from msgspec import Struct

from aegis.admin_client import AdminClient
from aegis.core.decision import Decision, DecisionKind
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId
from aegis.telemetry.files import parse, read_decisions, read_records, read_spans
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind
from bench.simulate.breakdown import Breakdown
from bench.simulate.fragmentation import Fragmentation
from bench.simulate.references import Comparison
from bench.simulate.study import Curve
from bench.simulate.switching import Switching

_LED_TO = (SpanKind.PREFILL, SpanKind.DECODE, SpanKind.SWITCH)
_OF_INSTANCES = (DecisionKind.TURN, DecisionKind.PREFILL)


class Reasons:
    """The decisions on each instance, indexed by the spans that followed from them."""

    def __init__(self, decisions: Iterable[Decision]) -> None:
        self._of: Mapping[InstanceId, list[Decision]] = defaultdict(list)
        for each in sorted(decisions, key=lambda each: each.at_ns):
            if each.kind in _OF_INSTANCES:
                self._of[each.instance].append(each)

    def line(self, span: Span) -> str:
        """Of the last decision before the span began, if that was for its model; empty otherwise. A switch begins with
        its turn, or on prefill instances before the prefill that it is for."""
        known = self._of.get(span.instance, [])
        at_ns = span.stop_ns if span.kind is SpanKind.SWITCH else span.start_ns
        at = bisect_right(known, at_ns, key=lambda each: each.at_ns) - 1
        found = span.kind in _LED_TO and at >= 0 and known[at].model == span.model
        return known[at].line if found else ""


class Served(Struct, frozen=True):
    """The fields that a report reads of a result of `aegis bench serve`, or of `vllm bench serve`, which has fewer."""

    completed: int
    duration: float
    failed: int = 0
    slo_attainment: float | None = None
    slo_tokens_met: int | None = None
    median_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    p99_itl_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """Curves of a simulation; `key` is what was swept, None if nothing was. `beside` is what others have published
    of them."""

    name: str
    key: str | None
    curves: tuple[Curve, ...]
    beside: tuple[Comparison, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of a suite that is no curve."""

    name: str
    result: Breakdown | Switching | Fragmentation


@dataclass(frozen=True, eq=False)
class Run:
    """Each part may be missing: it is empty then, or None."""

    name: str
    spans: Sequence[Span] = ()
    records: Sequence[Record] = ()
    result: Served | None = None
    memory: Sequence[MemoryReport] = field(default=())
    decisions: Sequence[Decision] = ()

    @cached_property
    def reasons(self) -> Reasons:
        return Reasons(self.decisions)

    @cached_property
    def start_ns(self) -> int:
        """The first moment that anything is known of: of spans alone, where records go by another clock."""
        starts = [span.start_ns for span in self.spans] + [record.arrival_ns for record in self._beside]
        return min(starts, default=0)

    @cached_property
    def stop_ns(self) -> int:
        stops = [span.stop_ns for span in self.spans]
        stops += [record.last_ns for record in self._beside if record.last_ns is not None]
        return max(stops, default=self.start_ns)

    @property
    def _beside(self) -> Sequence[Record]:
        """The records whose times may be held against those of the spans."""
        return self.records if self.one_clock or not self.spans else ()

    @cached_property
    def one_clock(self) -> bool:
        """Whether spans and records are of the same time: a client's own clock starts at 0, a server's when its machine
        did."""
        if not self.spans or not self.records:
            return False
        first_ns = min(span.start_ns for span in self.spans)
        last_ns = max(span.stop_ns for span in self.spans)
        return any(first_ns <= record.first_ns <= last_ns for record in self.records if record.first_ns is not None)


def read_run(
    spans: Path | None, records: Path | None, url: str | None, key: str | None, decisions: Path | None = None
) -> Run:
    """Raises UserError: where neither or both are given, where a file is broken, and where nothing was done yet."""
    if (spans is None) == (url is None):
        raise UserError("give a file of spans, or the --url of a server")
    if spans is not None:
        run = Run(
            spans.name,
            read_spans(spans),
            read_records(records) if records else (),
            decisions=read_decisions(decisions) if decisions else (),
        )
    else:
        assert url is not None
        if records is not None or decisions is not None:
            raise UserError("--records and --decisions are files beside one of spans; a server is asked for its own")
        run = _fetched(url, key)
    if not run.spans:
        raise UserError(f"{run.name}: holds no spans")
    return run


def _fetched(url: str, key: str | None) -> Run:
    server = AdminClient(url, key)
    return Run(
        url,
        parse(server.spans(), Span, f"{url}/debug/spans"),
        parse(server.records(), Record, f"{url}/debug/records"),
        decisions=parse(server.decisions()[0], Decision, f"{url}/debug/decisions"),
    )
