"""The use of time by instances and their links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aegis.core.ids import InstanceId
from aegis.telemetry.spans import Span, SpanKind
from bench.report.intervals import covered, dealt, edges
from bench.report.run import Run

COMPUTE = (SpanKind.PREFILL, SpanKind.DECODE)
WEIGHTS = (SpanKind.LOAD, SpanKind.PREFETCH)
INWARDS = (*WEIGHTS, SpanKind.SWAP_IN)
BUSY = ("prefill", "decode", "switch")
_BINS = 100


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of an instance's link: the share of the time in which something was copied, and how much."""

    busy: float
    nbytes: dict[SpanKind, int]
    busy_s: float

    @property
    def bytes_per_s(self) -> float:
        """While it was busy."""
        return sum(self.nbytes.values()) / self.busy_s if self.busy_s else 0.0


def instances(spans: Iterable[Span]) -> dict[InstanceId, list[Span]]:
    """Prefill first, by number."""
    found: dict[InstanceId, list[Span]] = {}
    for span in spans:
        found.setdefault(span.instance, []).append(span)
    return dict(sorted(found.items(), key=lambda entry: _order(entry[0])))


def utilisation(run: Run) -> dict[InstanceId, dict[str, float]]:
    """Shares of the run's time by `BUSY`; the rest is idle. What overlaps counts once, computing before switching."""
    whole_ns = max(run.stop_ns - run.start_ns, 1)
    shares = {}
    for name, spans in instances(run.spans).items():
        prefill, compute, busy = (
            covered(span for span in spans if span.kind in kinds).total_ns
            for kinds in (COMPUTE[:1], COMPUTE, (*COMPUTE, SpanKind.SWITCH))
        )
        amounts = (prefill, compute - prefill, busy - compute)
        shares[name] = {part: amount / whole_ns for part, amount in zip(BUSY, amounts, strict=True)}
    return shares


def link(spans: Sequence[Span], kinds: Sequence[SpanKind], whole_ns: int) -> Link:
    """The spans of these kinds among an instance's spans."""
    own = [span for span in spans if span.kind in kinds]
    nbytes = {kind: sum(span.nbytes for span in own if span.kind is kind) for kind in kinds}
    busy_ns = covered(own).total_ns
    return Link(busy_ns / max(whole_ns, 1), nbytes, busy_ns / 1e9)


def computing(run: Run) -> list[tuple[float, float]]:
    """The share of all instances that compute, over seconds since the start."""
    own = [span for span in run.spans if span.kind in COMPUTE]
    count = max(len(instances(run.spans)), 1)
    return _over_time(run, own, [span.device_ns / 1e9 / count for span in own])


def rates(run: Run, kinds: Sequence[SpanKind]) -> list[tuple[float, float]]:
    """Bytes per second of all instances' links together, over seconds since the start."""
    own = [span for span in run.spans if span.kind in kinds]
    return _over_time(run, own, [span.nbytes for span in own])


def _over_time(run: Run, spans: Sequence[Span], amounts: Sequence[float]) -> list[tuple[float, float]]:
    at_ns = edges(run.start_ns, run.stop_ns, _BINS)
    width_s = float(at_ns[1] - at_ns[0]) / 1e9
    middles = (at_ns[:-1] + at_ns[1:]) / 2 - run.start_ns
    return [
        (float(at) / 1e9, float(amount) / width_s)
        for at, amount in zip(middles, dealt(spans, amounts, at_ns), strict=True)
    ]


def _order(name: InstanceId) -> tuple[bool, str, int, str]:
    role, _, number = name.rpartition("-")
    return not name.startswith("prefill"), role, int(number) if number.isdigit() else 0, name
