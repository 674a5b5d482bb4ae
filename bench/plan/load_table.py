"""The curve of tokens on time against traffic, as a sentence, a table and a plot."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from bench.common.numbers import number, percent, seconds
from bench.plan.load_curve import LoadCurve, LoadPoint
from bench.simulate import plot_files

_ASKED = 2.0  # what people ask first
_TITLES = ("on time", "tokens/s", "TTFT p99")
_REFUSING = ("refused", "refusing: on time", "tokens/s", "TTFT p99")


def load_sentence(curve: LoadCurve, gpu: str) -> str:
    """A sentence on twice the traffic; where that was not asked for, on the most traffic."""
    at = next((at for at, point in enumerate(curve.ours.points) if point.load == _ASKED), -1)
    ours, line, theirs = curve.beside()[at]
    own, other = (percent(point.figures.attainment) for point in (ours, theirs))
    return (
        f"At {ours.load:g} × the traffic {curve.gpus} × {gpu} have {own} of tokens on time with "
        f"{curve.ours.contender}, and {other} with the best rival, {line.contender}."
    )


def load_table(curve: LoadCurve) -> Table:
    """A row for each load: ours, ours that refuses, and the best rival."""
    shown = Table(box=None, pad_edge=False)
    for title in ("traffic", "asked for", *_TITLES, *_REFUSING, "best rival", *_TITLES):
        shown.add_column(title, justify="left" if title == "best rival" else "right")
    for at, (ours, line, theirs) in enumerate(curve.beside()):
        refusing = curve.refusing.points[at]
        own = (*_cells(ours), f"{refusing.refused:,}", *_cells(refusing))
        shown.add_row(f"{ours.load:g} ×", number(ours.asked_per_s), *own, line.contender, *_cells(theirs))
    return shown


def draw(curve: LoadCurve, gpu: str, file: Path) -> None:
    """The shares, and the tokens a second beside those asked for. Rivals that are nowhere the best are grey. Raises
    UserError."""
    figure, (shares, rates) = plot_files.sheet(2, f"Tokens on time with {curve.gpus} × {gpu}")
    best = [line for at, line in enumerate(curve.rivals) if at in curve.best_rival]
    lines = [*(line for line in curve.rivals if line not in best), *best, curve.refusing, curve.ours]
    loads = [point.load for point in curve.ours.points]
    rates.plot(loads, [point.asked_per_s for point in curve.ours.points], "--", color="grey", label="asked for")
    for at, line in enumerate(lines):
        known = line in (*best, curve.refusing, curve.ours)
        color = f"C{len(lines) - 1 - at}" if known else "lightgrey"
        style = {"color": color, "marker": "o" if known else None, "markersize": 3.5}
        label = line.contender if known else None
        shares.plot(loads, [100 * p.figures.attainment for p in line.points], label=label, **style)  # type: ignore[arg-type]
        rates.plot(loads, [point.on_time_per_s for point in line.points], label=label, **style)  # type: ignore[arg-type]
    shares.set_ylabel("tokens on time, %")
    shares.set_ylim(0, 105)
    rates.set_ylabel("tokens on time a second")
    rates.set_ylim(bottom=0)
    for axes in (shares, rates):
        axes.set_xlabel("traffic, × the workload's")
        axes.grid(alpha=0.25)
        axes.legend(fontsize="small")
    plot_files.save(figure, file)


def _cells(point: LoadPoint) -> list[str]:
    ttft_ms = point.figures.ttft_p99_ms
    return [
        percent(point.figures.attainment),
        number(point.on_time_per_s),
        seconds(None if ttft_ms is None else ttft_ms / 1e3),
    ]
