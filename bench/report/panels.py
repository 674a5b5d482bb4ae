"""Figures of a suite that are no curves (`aegis simulate --suite fig14` to `fig16`), as cards for the sections."""

from __future__ import annotations

from bench.common.numbers import percent, seconds, size
from bench.report.folder import Folder
from bench.report.markup import Markup, table
from bench.report.page_charts import Axis, Series, lines, shares
from bench.report.section import card
from bench.simulate import breakdown
from bench.simulate.breakdown import Breakdown
from bench.simulate.fragmentation import Fragmentation
from bench.simulate.switching import Switching

_FLOOR_MS = 0.1


def latency_cards(folder: Folder) -> list[Markup]:
    """All of a folder's breakdowns on one card."""
    found = {panel.name: panel.result for panel in folder.panels if isinstance(panel.result, Breakdown)}
    if not found:
        return []
    names = {stage: stage.replace("_", " ") for stage in breakdown.STAGES}
    bars = {name: {names[stage]: getattr(each, stage) for stage in names} for name, each in found.items()}
    rows = [(name, *map(percent, bar.values()), seconds(found[name].mean_s)) for name, bar in bars.items()]
    told = "; ".join(
        f"{name}: " + ", ".join(f"{stage} {percent(share)}" for stage, share in bar.items())
        for name, bar in bars.items()
    )
    head = ("conditions", *names.values(), "mean of a request")
    plot = shares(f"Latency breakdown of suites. {told}.", bars, tuple(names.values()))
    return [card("Suites", plot, table(head, rows, caption="Share of the total time of requests"), wide=True)]


def switching_cards(folder: Folder) -> list[Markup]:
    return [_switching(panel.name, panel.result) for panel in folder.panels if isinstance(panel.result, Switching)]


def fragmentation_cards(folder: Folder) -> list[Markup]:
    found = [(panel.name, panel.result) for panel in folder.panels if isinstance(panel.result, Fragmentation)]
    found = [(name, result) for name, result in found if result.shapes]
    return [_fragmentation(name, result) for name, result in found]


def _switching(name: str, result: Switching) -> Markup:
    all_of = {f"to {root}": each for root, each in result.switches.items()} | {"KV copy": result.kv_copies}
    curves = {title: each for title, each in all_of.items() if each.count}
    series = [
        Series(title, [(max(ms, _FLOOR_MS), (at + 1) / 100) for at, ms in enumerate(each.cdf_ms)])
        for title, each in curves.items()
    ]
    rows = [
        (title, f"{each.count:,}", *(seconds(each.cdf_ms[at - 1] / 1e3) for at in (50, 90, 99, 100)))
        for title, each in curves.items()
    ]
    told = "; ".join(f"{row[0]}: median {row[2]}, p99 {row[4]}" for row in rows)
    axis = Axis(f"milliseconds ({_FLOOR_MS:g} and less at the left)", log=True)
    plot = lines(f"{name}: {told}.", series, axis, Axis("", 0.0, 1.0, percent=True))
    head = ("what", "count", "median", "p90", "p99", "longest")
    return card(f"{name}, {percent(result.prefetched)} prefetched", plot, table(head, rows, caption=name))


def _fragmentation(name: str, result: Fragmentation) -> Markup:
    bars = {shape: {"unused": waste.of_peak} for shape, waste in result.shapes.items()}
    rows = [
        (shape, percent(waste.of_held), percent(waste.of_peak), size(waste.peak_bytes))
        for shape, waste in result.shapes.items()
    ]
    told = "; ".join(f"{row[0]} {row[2]}" for row in rows)
    head = ("shape", "unused, of what was held", "unused, of the most held", "most held")
    plot = shares(f"{name}: fragmentation, of the most held. {told}.", bars, ("unused",))
    return card(f"{name}: unused, of the most held", plot, table(head, rows, caption=name))
