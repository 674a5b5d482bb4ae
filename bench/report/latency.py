"""Section: where the time of requests went."""

from __future__ import annotations

from bench.report.folder import Folder
from bench.report.markup import Markup, table
from bench.report.numbers import percent, seconds
from bench.report.panels import latency_cards
from bench.report.section import RECORDS, SPANS, card, lacking, section
from bench.report.stages import STAGES, Stages, stages
from bench.report.svg import shares


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
