"""Section: where the time of requests went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aegis.core.ids import InstanceId, ModelId
from aegis.telemetry.spans import Span, SpanKind
from bench.common.numbers import percent, seconds
from bench.report.folder import Folder
from bench.report.intervals import Covered, covered
from bench.report.markup import Markup, table
from bench.report.matching import Match, matches
from bench.report.page_charts import shares
from bench.report.panels import latency_cards
from bench.report.run import Run
from bench.report.section import RECORDS, SPANS, card, lacking, section

STAGES = ("prefill waiting", "prefill", "decode waiting", "decoding", "switching")

_Busy = dict[tuple[InstanceId, ModelId], Covered]


@dataclass(frozen=True, slots=True)
class Stages:
    """Where the time of requests went (Aegaeon §7.3, Figure 14): totals over `requests`; `unmatched` are those whose
    prefill was not found."""

    total_ns: dict[str, int]
    requests: int
    unmatched: int

    def share(self, stage: str) -> float:
        return self.total_ns[stage] / max(sum(self.total_ns.values()), 1)

    def mean_s(self, stage: str) -> float:
        return self.total_ns[stage] / max(self.requests, 1) / 1e9


def stages(run: Run) -> Stages:
    """The stages of the requests that finished. Each one's stages add up to the time from its arrival to its last
    token."""
    found, lost = matches(run.records, run.spans)
    decoding, switching = (_by_place(run.spans, kind) for kind in (SpanKind.DECODE, SpanKind.SWITCH))
    each = [_of(match, decoding, switching) for match in found]
    totals = [sum(values) for values in zip(*each, strict=True)] or [0] * len(STAGES)
    return Stages(dict(zip(STAGES, totals, strict=True)), len(found), len(lost))


def _of(match: Match, decoding: _Busy, switching: _Busy) -> tuple[int, ...]:
    """The times of a request's stages, in the order of `STAGES`."""
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


def latency(folder: Folder) -> Markup:
    found = {run.name: stages(run) for run in folder.runs if run.one_clock}
    found = {name: each for name, each in found.items() if each.requests}
    apart = [run.name for run in folder.runs if run.spans and run.records and run.name not in found]
    return section(
        "latency",
        "Latency breakdown",
        "All the time between the arrivals of requests and their last tokens, by how it was spent. Switching is the "
        "change to a request's own model while it waits, with the copies of weights and KV.",
        *([_card(found)] if found else []),
        *latency_cards(folder),
        lacking("latency breakdown", folder.without(lambda run: run.spans), SPANS),
        lacking("latency breakdown", folder.without(lambda run: run.records), RECORDS),
        lacking(
            "latency breakdown",
            apart,
            "no request of its records is in its spans; a client's records go by another clock than a server's spans, "
            "whose own are at `/debug/records`",
        ),
    )


def _card(found: dict[str, Stages]) -> Markup:
    bars = {name: {stage: each.share(stage) for stage in STAGES} for name, each in found.items()}
    rows = []
    for name, each in found.items():
        cells = (f"{seconds(each.mean_s(stage))} ({percent(each.share(stage))})" for stage in STAGES)
        rows.append((name, *cells, f"{each.requests:,}", f"{each.unmatched:,}"))
    told = "; ".join(
        f"{name}: " + ", ".join(f"{stage} {percent(part[stage])}" for stage in STAGES) for name, part in bars.items()
    )
    return card(
        "Share of the total time of requests",
        shares(f"Latency breakdown. {told}.", bars, STAGES),
        table(("run", *STAGES, "requests", "not matched"), rows, caption="Mean per request, and share of all"),
        wide=True,
    )
