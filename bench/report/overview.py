"""Sections: what each run came to, and what each run's files tell."""

from __future__ import annotations

from bench.common.numbers import NONE, number, percent, seconds
from bench.compare.runs import ratio
from bench.report.folder import Folder
from bench.report.markup import Markup, element, table
from bench.report.results import METRICS, Metric, Values, rows
from bench.report.section import section

_SHOWN = {"number": number, "s": seconds, "share": percent}


def results(folder: Folder) -> Markup:
    """A column for each run, and for all but the first the ratio to that one."""
    found = rows(folder.runs, folder.sweeps)
    found = {name: values for name, values in found.items() if values}
    if not found:
        return section("results", "Results", "Nothing here is the result of a single run.")
    first, *others = found
    head = ["", first]
    for name in others:
        head += [name, "ratio"]
    body = [
        [metric.title, *_cells(metric, found[first], [found[name] for name in others])]
        for metric in METRICS
        if any(values.get(metric.name) is not None for values in found.values())
    ]
    about = "TTFT is from the arrival to the first token."
    if others:
        about += f" Ratios are to {first}: ▲ is better, ▼ worse."
    return section("results", "Results", about, table(head, body, caption="Results of each run"))


def files(folder: Folder) -> Markup:
    body = [
        (
            run.name,
            "yes" if run.result else NONE,
            f"{len(run.records):,}" if run.records else NONE,
            f"{len(run.spans):,}" if run.spans else NONE,
            f"{len(run.memory):,}" if run.memory else NONE,
        )
        for run in folder.runs
    ]
    parts = []
    if body:
        head = ("run", "result", "records", "spans", "memory reports")
        parts.append(table(head, body, caption="What there is of each run"))
    if folder.sweeps or folder.panels:
        names = [sweep.name for sweep in folder.sweeps] + [panel.name for panel in folder.panels]
        parts.append(element("p", "Simulations: ", "; ".join(names), "."))
    if folder.unknown:
        parts.append(
            element("p", "Not of a kind that is known here: ", ", ".join(folder.unknown), ".", class_="lacking")
        )
    return section("files", "Files", f"What {folder.name} holds. {NONE} is what is missing.", *parts)


def _cells(metric: Metric, first: Values, others: list[Values]) -> list[str]:
    before, shown = first.get(metric.name), _SHOWN[metric.unit]
    cells = [shown(before)]
    for values in others:
        after = values.get(metric.name)
        cells += [shown(after), _ratio(metric, before, after)]
    return cells


def _ratio(metric: Metric, before: float | None, after: float | None) -> str:
    quotient = ratio(before, after) if before is not None and after is not None else None
    if quotient is None:
        return NONE
    text = f"{quotient:.3f}"
    if metric.more is None or text == "1.000":
        return text
    return f"{text} {'▲' if (quotient > 1) == metric.more else '▼'}"
