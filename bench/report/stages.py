"""Where the time of requests went (Aegaeon §7.3, Figure 14)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aegis.core.ids import InstanceId, ModelId
from aegis.telemetry.spans import Span, SpanKind
from bench.report.intervals import Covered, covered
from bench.report.matching import Match, matches
from bench.report.run import Run

STAGES = ("prefill waiting", "prefill", "decode waiting", "decoding", "switching")

_Busy = dict[tuple[InstanceId, ModelId], Covered]


@dataclass(frozen=True, slots=True)
class Stages:
    """Totals over `requests`; `unmatched` are those whose prefill was not found."""

    total_ns: dict[str, int]
    requests: int
    unmatched: int

    def share(self, stage: str) -> float:
        return self.total_ns[stage] / max(sum(self.total_ns.values()), 1)

    def mean_s(self, stage: str) -> float:
        return self.total_ns[stage] / max(self.requests, 1) / 1e9


def stages(run: Run) -> Stages:
    """Of the requests that finished. Each one's stages add up to the time from its arrival to its last token."""
    found, lost = matches(run.records, run.spans)
    decoding, switching = (_by_place(run.spans, kind) for kind in (SpanKind.DECODE, SpanKind.SWITCH))
    each = [_of(match, decoding, switching) for match in found]
    totals = [sum(values) for values in zip(*each, strict=True)] or [0] * len(STAGES)
    return Stages(dict(zip(STAGES, totals, strict=True)), len(found), len(lost))


def _of(match: Match, decoding: _Busy, switching: _Busy) -> tuple[int, ...]:
    """In the order of `STAGES`."""
    arrival_ns, first_ns, last_ns, prefill = match.record.arrival_ns, match.first_ns, match.last_ns, match.prefill
    before_ns = _within(switching, prefill, arrival_ns, prefill.start_ns)
    decoding_ns = between_ns = 0
    if match.run is not None:
        decoding_ns = _within(decoding, match.run, first_ns, last_ns)
        between_ns = min(_within(switching, match.run, first_ns, last_ns), last_ns - first_ns - decoding_ns)
    return (
        prefill.start_ns - arrival_ns - before_ns,
        first_ns - prefill.start_ns,  # with the token's way to the client
        last_ns - first_ns - decoding_ns - between_ns,
        decoding_ns,
        before_ns + between_ns,
    )


def _within(busy: _Busy, where: Span, start_ns: int, stop_ns: int) -> int:
    own = busy.get((where.instance, where.model))
    return own.within(start_ns, stop_ns) if own else 0


def _by_place(spans: Iterable[Span], kind: SpanKind) -> _Busy:
    found: dict[tuple[InstanceId, ModelId], list[Span]] = {}
    for span in spans:
        if span.kind is kind:
            found.setdefault((span.instance, span.model), []).append(span)
    return {place: covered(own) for place, own in found.items()}
