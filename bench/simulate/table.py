"""Curves as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from bench.simulate.study import Curve, Point

_WIDTH = 200
_TITLES = (
    "attainment, %",
    "goodput, tokens/s",
    "TTFT p50, s",
    "TTFT p99, s",
    "gap p99, s",
    "switches",
    "utilisation, %",
)


def show(curves: Iterable[Curve], key: str | None, *, title: str | None = None) -> None:
    """Prints a row for each point, and what of each curve lies at 90 %."""
    console = plain_console()
    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for name in ((key,) if key else ()) + _TITLES + ("failed",):
        table.add_column(name, justify="right")
    crossings = []
    for curve in curves:
        for point in curve.points:
            table.add_row(curve.policy, *((f"{point.at:g}",) if key else ()), *_cells(point))
        if curve.crossing:
            crossings.append(f"  {curve.policy:<28} {curve.crossing}")
    console.print(*([title] if title else []), table, sep="\n")
    if crossings:
        console.print(f"\n{key} at 90 % attainment", *crossings, sep="\n")


def plain_console() -> Console:
    """Wide also where a terminal is not: it wraps what it has no room for, where figures would be cut off."""
    return Console(markup=False, highlight=False, width=max(Console().width, _WIDTH))


def _cells(point: Point) -> tuple[str, ...]:
    figures = point.figures
    return (
        f"{100 * figures.attainment:.2f}",
        f"{figures.goodput_tokens_per_s:.1f}",
        _seconds(figures.ttft_p50_ms),
        _seconds(figures.ttft_p99_ms),
        _seconds(figures.tbt_p99_ms),
        str(figures.switches),
        f"{100 * figures.utilisation:.1f}",
        str(figures.failed),
    )


def _seconds(ms: float | None) -> str:
    return "-" if ms is None else f"{ms / 1e3:.3f}"
