"""Section: how long changes of model took."""

from __future__ import annotations

from bench.report.folder import Folder
from bench.report.markup import Markup, table
from bench.report.numbers import percent, seconds
from bench.report.panels import switching_cards
from bench.report.run import Run
from bench.report.section import SPANS, card, lacking, section
from bench.report.svg import Axis, Series, lines
from bench.report.switches import cumulative, switches
from bench.simulate.figures import percentile

_FLOOR_MS = 0.1


def switching(folder: Folder) -> Markup:
    found = {run: kinds for run in folder.runs if (kinds := _by_kind(run))}
    return section(
        "switching",
        "Switch latency",
        "From the wish for another model to its first step. Prefetched: the model's weights had come before or were on "
        "their way, so that no load began during the switch.",
        *([_card({run.name: kinds for run, kinds in found.items()})] if found else []),
        *switching_cards(folder),
        lacking("switches", folder.without(lambda run: run.spans), SPANS),
        lacking(
            "switches", [run.name for run in folder.runs if run.spans and run not in found], "no model was changed"
        ),
    )


def _by_kind(run: Run) -> dict[str, tuple[int, ...]]:
    both = switches(run.spans)
    kinds = {"prefetched": both.prefetched_ns, "not prefetched": both.loaded_ns}
    return {kind: ordered for kind, ordered in kinds.items() if ordered}


def _card(found: dict[str, dict[str, tuple[int, ...]]]) -> Markup:
    series, rows = [], []
    for name, kinds in found.items():
        total = sum(map(len, kinds.values()))
        for kind, ordered in kinds.items():
            curve = cumulative([max(ns / 1e6, _FLOOR_MS) for ns in ordered])
            series.append(Series(f"{name}, {kind}", curve))
            shown = (seconds(_s(ordered, percent)) for percent in (50, 90, 99, 100))
            rows.append((f"{name}, {kind}", f"{len(ordered):,}", percent(len(ordered) / total), *shown))
    told = "; ".join(f"{row[0]}: {row[2]} of switches, median {row[3]}, p99 {row[5]}" for row in rows)
    return card(
        "Cumulative share of switches",
        lines(
            f"Switch latency. {told}.",
            series,
            Axis(f"milliseconds ({_FLOOR_MS:g} and less at the left)", log=True),
            Axis("", 0.0, 1.0, percent=True),
        ),
        table(("run", "switches", "share", "median", "p90", "p99", "longest"), rows, caption="Switch latency"),
    )


def _s(ordered: tuple[int, ...], percent: int) -> float:
    value = percentile(ordered, percent)
    assert value is not None
    return value / 1e9
