"""Section: how long changes of model took."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aegis.core.ids import InstanceId, ModelId
from aegis.telemetry.spans import Span, SpanKind
from bench.common.numbers import percent, seconds
from bench.common.percentiles import percentile
from bench.report.folder import Folder
from bench.report.markup import Markup, table
from bench.report.page_charts import Axis, Series, lines
from bench.report.panels import switching_cards
from bench.report.run import Run
from bench.report.section import SPANS, card, lacking, section


@dataclass(frozen=True, slots=True)
class Switches:
    """Durations of changes of model (Aegaeon §7.3, Figure 15 left) in ascending order; `prefetched` where no load began
    during the change: the weights had come before, or were on their way."""

    prefetched_ns: tuple[int, ...]
    loaded_ns: tuple[int, ...]


def switches(spans: Iterable[Span]) -> Switches:
    changes: list[Span] = []
    loads: dict[tuple[InstanceId, ModelId], list[int]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.kind is SpanKind.SWITCH:
            changes.append(span)
        elif span.kind is SpanKind.LOAD:
            loads.setdefault((span.instance, span.model), []).append(span.start_ns)
    prefetched: list[int] = []
    loaded: list[int] = []
    for span in changes:
        starts = loads.get((span.instance, span.model), [])
        at = bisect_left(starts, span.start_ns)
        began = at < len(starts) and starts[at] < span.stop_ns
        (loaded if began else prefetched).append(span.stop_ns - span.start_ns)
    return Switches(tuple(sorted(prefetched)), tuple(sorted(loaded)))


def cumulative(ordered: Sequence[float], points: int = 200) -> list[tuple[float, float]]:
    """At most so many `(value, share that is no larger)` of values in ascending order."""
    count = len(ordered)
    ranks = sorted({max(-(-count * point // points), 1) for point in range(points + 1)}) if count else []
    return [(ordered[rank - 1], rank / count) for rank in ranks]


_FLOOR_MS = 0.1


def switching(folder: Folder) -> Markup:
    found = {run: kinds for run in folder.runs if (kinds := _by_kind(run))}
    return section(
        "switching",
        "Switch latency",
        "From the request for another model to its first step. Prefetched: the model's weights had come before or were "
        "on their way, so that no load began during the switch.",
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
