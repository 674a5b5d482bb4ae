"""Cells and contenders as a table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table

from bench.simulate import plots, table
from bench.simulate.cells.figures import CellFigures, summary, value
from bench.simulate.cells.search import Aim
from bench.simulate.cells.suites import OURS, CellSuite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^vDPX*<>"
_UNITS = {Aim.MODELS: "models", Aim.GPUS: "GPUs"}


def show(suite: CellSuite, cells: Sequence[CellFigures]) -> None:
    """A row for each contender and cell, ours first, and what it comes to."""
    shown = Table(box=None, pad_edge=False)
    for title in ("", "contender", _UNITS[suite.aim], "of each seed"):
        shown.add_column(title, justify="right" if title == _UNITS[suite.aim] else "left")
    for cell in cells:
        for index, each in enumerate(cell.contenders):
            seeds = ", ".join(str(found.at) for found in each.found)
            shown.add_row("" if index else cell.cell, each.contender, str(each.median), seeds)
    ratios = Table(box=None, pad_edge=False)
    for title in ("", OURS, "best rival", "", "ratio"):
        ratios.add_column(title, justify="left" if title in ("", "best rival") else "right")
    for cell in cells:
        medians = {each.contender: str(each.median) for each in cell.contenders}
        ratio = "-" if cell.ratio is None else f"{cell.ratio:.2f}"
        best = cell.best_rival or "-"
        ratios.add_row(cell.cell, medians.get(OURS, "-"), medians.get(best, "-"), best, ratio)
    table.plain_console().print(suite.title, shown, "", ratios, "", summary(cells), sep="\n")


def drawn(suite: CellSuite, cells: Sequence[CellFigures]) -> Figure:
    """A panel for each first part of the cells' names, a mark for each contender."""
    panels = [(name, list(group)) for name, group in groupby(cells, key=lambda cell: cell.cell.partition("/")[0])]
    figure, axes = plots.sheet(len(panels), suite.title)
    for (name, group), place in zip(panels, axes, strict=True):
        _draw(place, suite, name, group)
    if axes:
        axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw(axes: Axes, suite: CellSuite, name: str, cells: Sequence[CellFigures]) -> None:
    names = [cell.cell.partition("/")[2] or cell.cell for cell in cells]
    for index, contender in enumerate(each.name for each in suite.contenders):
        medians = {
            at: value(each.median)
            for at, cell in enumerate(cells)
            for each in cell.contenders
            if each.contender == contender
        }
        marker = _MARKERS[index % len(_MARKERS)]
        color = f"C{index % 10}"
        axes.scatter(list(medians), list(medians.values()), label=contender, marker=marker, color=color)
    axes.set_title(name, fontsize="medium")
    axes.set_ylabel(_UNITS[suite.aim])
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.grid(alpha=0.25)
