"""Plots as files, .png or .svg, that `aegis simulate --plot` writes: one for each form of figure that a suite has.

matplotlib draws them, since a PNG needs somebody who draws letters and lines into pixels, and papers and slides take
such files. The charts of a report's page are others, `bench/report/page_charts.py`: a page takes its colours from the
reader's theme, its letters from the browser and its bars and tables from HTML, and loads nothing. matplotlib's SVG has
none of that: its letters are paths, its colours are fixed, and each chart is some four times as large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from aegis.core.errors import UserError
from bench.common import result_files
from bench.simulate.breakdown import STAGES, Breakdown
from bench.simulate.cells.figures import CellFigures
from bench.simulate.cells.search import UNITS, end_of
from bench.simulate.cells.suites import CellSuite
from bench.simulate.fragmentation import Fragmentation
from bench.simulate.overload.figures import OverloadCell
from bench.simulate.study import Curve
from bench.simulate.sweep import GOAL
from bench.simulate.switching import PERCENTS, Switching
from bench.simulate.utilisation import Utilisation

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = (".png", ".svg")
_WIDTH_IN, _HEIGHT_IN = 5.2, 3.8
_COLUMNS_MAX = 3
_COLORS = 10
"""Of matplotlib's cycle."""

_MARKERS = "os^vDPX*<"
"""One less than there are colours: only the 91st contender looks like the first."""


def check(file: Path) -> None:
    """Before hours are spent on what cannot be drawn. Raises UserError."""
    if file.suffix not in _KINDS:
        raise UserError(f"--plot {file}: should end in {' or '.join(_KINDS)}")
    result_files.check(file)


def sheet(panels: int, title: str = "") -> tuple[Figure, list[Axes]]:
    """An empty figure with room for so many panels, in even rows where there are many."""
    from matplotlib.figure import Figure

    columns = 2 if panels == 4 else 4 if panels % 4 == 0 else min(panels, _COLUMNS_MAX)
    rows = -(-panels // columns)
    figure = Figure(figsize=(_WIDTH_IN * columns, _HEIGHT_IN * rows), layout="constrained")
    figure.suptitle(title, wrap=True)
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(panels)]
    return figure, axes


def save(figure: Figure, file: Path) -> None:
    """The same figure makes the same bytes. Where no panel has a legend, one is beside all of them: within a panel it
    hides lines. Raises UserError."""
    import matplotlib

    if all(axes.get_legend() is None for axes in figure.axes):
        _explain(figure)

    dateless = {"Date": None} if file.suffix == ".svg" else {}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "aegis"}):
            figure.savefig(file, dpi=120, metadata=dateless)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def _style(index: int) -> tuple[str, str]:
    """Colour and marker of a contender."""
    return f"C{index % _COLORS}", _MARKERS[index % len(_MARKERS)]


def _explain(figure: Figure) -> None:
    lines: dict[str, Artist] = {}
    for axes in figure.axes:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, line)
    if lines:
        figure.legend(list(lines.values()), list(lines), loc="outside right center", fontsize="small")


def attainment(axes: Axes, curves: Sequence[Curve], key: str | None, title: str = "") -> None:
    """A line per policy where something is swept, else a bar."""
    axes.set_title(title, fontsize="medium")
    axes.set_ylabel("tokens on time, %")
    axes.set_ylim(0, 105)
    axes.axhline(100 * GOAL, color="grey", linestyle="--", linewidth=0.8)
    if key is None:
        axes.bar([curve.policy for curve in curves], [100 * curve.points[0].figures.attainment for curve in curves])
        axes.tick_params(axis="x", rotation=20)
        return
    for index, curve in enumerate(curves):
        values = [point.at for point in curve.points if point.at is not None]
        shares = [100 * point.figures.attainment for point in curve.points]
        color, marker = _style(index)
        line = "-" if index < _COLORS else "--"
        axes.plot(values, shares, line, label=curve.policy, color=color, marker=marker, markersize=3.5, linewidth=1.2)
        if curve.crossing and curve.crossing.at is not None:
            axes.axvline(curve.crossing.at, color=color, linestyle=":", linewidth=0.8)
    axes.set_xlabel({"models": "models", "rps": "requests per second and model"}.get(key, key))
    axes.grid(alpha=0.25)


def breakdowns(axes: Axes, results: Sequence[tuple[str, Breakdown]]) -> None:
    """Stacked bars, one for each named result."""
    names = [name for name, _ in results]
    bottom = [0.0] * len(results)
    for stage in STAGES:
        shares = [100 * float(getattr(result, stage)) for _, result in results]
        axes.bar(names, shares, bottom=bottom, label=stage.replace("_", " "))
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes.set_ylabel("share of the time of requests, %")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def switching(axes: Axes, result: Switching, title: str) -> None:
    """Switches and copies of KV as cumulative curves."""
    lines = {f"switch to {root}": each for root, each in result.switches.items()} | {"copy of KV": result.kv_copies}
    for name, each in lines.items():
        if each.count:
            axes.plot([ms / 1e3 for ms in each.cdf_ms], PERCENTS, label=f"{name} ({each.count})", linewidth=1.2)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("seconds")
    axes.set_ylabel("took no longer, %")
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small", loc="lower right")


def fragmentation(axes: Axes, results: Sequence[tuple[str, Fragmentation]]) -> None:
    """A group of bars for each named result."""
    shapes = sorted({shape for _, result in results for shape in result.shapes})
    width = 0.8 / len(results)
    for index, (name, result) in enumerate(results):
        places = [at + index * width for at in range(len(shapes))]
        shares = [100 * result.shapes[shape].of_peak if shape in result.shapes else 0.0 for shape in shapes]
        axes.bar(places, shares, width=width, label=name)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(shapes))], shapes)
    axes.set_ylabel("unused, % of the most held")
    axes.legend(fontsize="small")


def utilisation(axes: Axes, results: Sequence[tuple[str, Utilisation]]) -> None:
    """A line over time for each named result."""
    for name, result in results:
        axes.plot(range(len(result.by_minute)), [100 * share for share in result.by_minute], label=name)
    axes.set_xlabel("minutes")
    axes.set_ylabel("computing, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")


def shares(axes: Axes, found: Mapping[str, Mapping[float, float]], key: str, title: str, label: str) -> None:
    """A line for each contender over what is swept."""
    for index, (name, line) in enumerate(found.items()):
        color, marker = _style(index)
        axes.plot(list(line), [100 * share for share in line.values()], label=name, marker=marker, color=color)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel({"gpus": "GPUs", "both scales": "times both deadlines"}.get(key, key))
    axes.set_xticks(sorted({at for line in found.values() for at in line}))
    axes.set_ylabel(label)
    axes.set_ylim(0, 105)
    axes.grid(alpha=0.25)


def series(axes: Axes, found: Mapping[str, Sequence[float]], every_s: int, title: str, label: str) -> None:
    """A line for each contender over time."""
    for name, values in found.items():
        axes.plot([at * every_s for at in range(len(values))], values, label=name)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("seconds")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)


def bars(axes: Axes, found: Mapping[str, float], label: str) -> None:
    axes.bar(list(found), list(found.values()))
    axes.set_ylabel(label)
    axes.tick_params(axis="x", rotation=20)


def overload(title: str, found: Sequence[OverloadCell]) -> Figure:
    """Tokens on time: a panel for each first part of the cells' names, a line for each contender."""
    panels = [(name, list(group)) for name, group in groupby(found, key=lambda cell: cell.cell.partition("/")[0])]
    figure, axes = sheet(len(panels), title)
    names = list(dict.fromkeys(each.contender for cell in found for each in cell.contenders))
    for (panel, group), place in zip(panels, axes, strict=True):
        for index, name in enumerate(names):
            shares = {
                at: 100 * each.figures.on_time
                for at, cell in enumerate(group)
                for each in cell.contenders
                if each.contender == name
            }
            color, marker = _style(index)
            place.plot(list(shares), list(shares.values()), label=name, marker=marker, color=color)
        place.set_title(panel, fontsize="medium")
        place.set_ylabel("tokens on time, %")
        place.set_ylim(0, 105)
        place.set_xticks(range(len(group)), [cell.cell.partition("/")[2] for cell in group])
        place.grid(alpha=0.25)
    axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def cells(suite: CellSuite, found: Sequence[CellFigures]) -> Figure:
    """A panel for each first part of the cells' names, a mark for each contender."""
    panels = [(name, list(group)) for name, group in groupby(found, key=lambda cell: cell.cell.partition("/")[0])]
    figure, axes = sheet(len(panels), suite.title)
    for (name, group), place in zip(panels, axes, strict=True):
        _draw_cells(place, suite, name, group)
    if axes:
        axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_cells(axes: Axes, suite: CellSuite, name: str, cells: Sequence[CellFigures]) -> None:
    names = [cell.cell.partition("/")[2] or cell.cell for cell in cells]
    for index, contender in enumerate(each.name for each in suite.contenders):
        medians = {
            at: end_of(each.median)
            for at, cell in enumerate(cells)
            for each in cell.contenders
            if each.contender == contender
        }
        color, marker = _style(index)
        axes.scatter(list(medians), list(medians.values()), label=contender, marker=marker, color=color)
    axes.set_title(name, fontsize="medium")
    axes.set_ylabel(UNITS[suite.aim])
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.grid(alpha=0.25)
