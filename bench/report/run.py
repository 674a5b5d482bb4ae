"""A run, as its files tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import Struct

from aegis.core.decision import Decision
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span
from bench.report.reasons import Reasons
from bench.simulate.breakdown import Breakdown
from bench.simulate.fragmentation import Fragmentation
from bench.simulate.references import Comparison
from bench.simulate.study import Curve
from bench.simulate.switching import Switching


class Served(Struct, frozen=True):
    """What a report reads of a result of `aegis bench serve`, or of `vllm bench serve`, which says less."""

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
    """Curves of a simulation; `key` is what was swept, None where nothing was. `beside` is what others have published
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
        """The first moment that anything is known of."""
        starts = [span.start_ns for span in self.spans] + [record.arrival_ns for record in self.records]
        return min(starts, default=0)

    @cached_property
    def stop_ns(self) -> int:
        stops = [span.stop_ns for span in self.spans]
        stops += [record.last_ns for record in self.records if record.last_ns is not None]
        return max(stops, default=self.start_ns)

    @cached_property
    def one_clock(self) -> bool:
        """Whether spans and records are of the same time: a client's own clock starts at 0, a server's when its machine
        did."""
        if not self.spans or not self.records:
            return False
        first_ns = min(span.start_ns for span in self.spans)
        last_ns = max(span.stop_ns for span in self.spans)
        return any(first_ns <= record.first_ns <= last_ns for record in self.records if record.first_ns is not None)
