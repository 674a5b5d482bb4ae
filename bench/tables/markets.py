"""The documentation's tables of markets: how many models a policy serves, and what is on time where not all can be."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import msgspec

from bench.common.provenance import RESULTS
from bench.simulate.cells.figures import CellFigures, summary
from bench.simulate.cells.suites import SPLITS, on_split
from bench.simulate.contenders import OURS, UNDIVIDED, Contender, rivals
from bench.simulate.overload.figures import LEAST_RATIO, MEDIAN_RATIO, Measured, OverloadCell, ttft_over
from bench.simulate.overload.suite import NAME as OVERLOAD
from bench.simulate.overload.suite import REFUSING
from bench.simulate.tuning import described
from bench.tables.missed_bars import reason_of
from bench.tables.results import markdown, where

_AHEAD = 1.15
_MEDIAN_AHEAD = 1.4
"""Of the best rival's models, at least so many times as many: in each cell, and in the median."""
_TTFT_OVER = 2.0
"""Of `overload`: times that of the rival with the most tokens on time."""


def cells(directory: Path = RESULTS) -> str:
    """One table of what `--suite cells` found: a row for each cell, medians over the seeds, and what it comes to."""
    file = directory / "cells.json"
    measured = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"cells": []}
    figures = msgspec.convert(measured["cells"], list[CellFigures])
    if not figures:
        return "Nothing has been searched for yet; the command above does it."
    seeds = [len(each.found) for cell in figures for each in cell.contenders]
    fewest, most = min(seeds), max(seeds)
    searched = f"{fewest} to {most}" if fewest < most else f"{most}"
    table = markdown(
        ("cell", f"`{OURS}`", "undivided", "6 + 10", "best rival", "", "ratio"), [_cell(cell) for cell in figures]
    )
    head = f"**{measured['title']}** ({where('cells', measured)}), seeds: {searched}"
    return f"{head}\n\n{table}\n\n{summary(figures)}{_behind(figures)}"


def _behind(cells: Iterable[CellFigures]) -> str:
    """Where the median of the cells misses its bar."""
    ratios = [cell.ratio for cell in cells if cell.ratio is not None]
    if not ratios or median(ratios) >= _MEDIAN_AHEAD:
        return ""
    return f"; the median **missed** {_MEDIAN_AHEAD:g}: {reason_of('cells: median')}"


def _cell(cell: CellFigures) -> list[str]:
    medians = {each.contender: str(each.median) for each in cell.contenders}
    best, ratio = cell.best_rival or "", "" if cell.ratio is None else f"{cell.ratio:.2f}"
    if cell.ratio is not None and cell.ratio < _AHEAD:
        ratio = f"{cell.ratio:.4f} **missed**, at least {_AHEAD:g}: {reason_of(f'cells/{best}')}"
    names = (OURS, UNDIVIDED, on_split(OURS, next(iter(SPLITS))), best)
    figures = [medians.get(name, "") for name in names]
    found = next((each.found for each in cell.contenders if each.contender == best), [])
    tuned = next((described(each.tuned.parameters, cell.setting.get("mixed")) for each in found if each.tuned), "")
    return [cell.cell, *figures, best and f"`{best}`{tuned and f' ({tuned})'}", ratio]


def overload(directory: Path = RESULTS) -> str:
    """One table of what `--suite overload` found: a row for each cell, and what it comes to."""
    file = directory / f"{OVERLOAD}.json"
    if not file.exists():
        return "Nothing has been measured yet; the command above does it."
    measured = json.loads(file.read_text(encoding="utf-8"))
    found = msgspec.convert(measured["cells"], list[OverloadCell])
    ours = (f"`{OURS}`, %", "tokens/s")
    last = ("ratio", "TTFT p99 over its", "refusing, %", "refusing: TTFT p99 over its", "switches", "computing, %")
    heads = ("cell", *ours, "undivided, %", "best rival, %", "", *last)
    rows = [_overload_row(cell) for cell in found]
    head = f"**{measured['title']}** ({where(OVERLOAD, measured)})"
    return f"{head}\n\n{markdown(heads, rows)}\n\n{measured['summary']}{_below(found)}"


def _below(cells: Iterable[OverloadCell]) -> str:
    """Where the median of the cells misses its bar."""
    ratios = [cell.ratio for cell in cells if cell.ratio is not None]
    if not ratios or median(ratios) >= MEDIAN_RATIO:
        return ""
    return f" **missed**: {reason_of(f'{OVERLOAD}: median')}"


def overload_rivals(directory: Path = RESULTS) -> str:
    """One table of what each rival of `--suite overload` has on time: a row for each cell, a column for each rival."""
    file = directory / f"{OVERLOAD}.json"
    measured = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"cells": []}
    everyone = [each for each in rivals() if each.rival]
    rows = [
        [cell.cell, *(_share(each, cell) for each in everyone)]
        for cell in msgspec.convert(measured["cells"], list[OverloadCell])
    ]
    return markdown(("cell", *(f"`{each.name}`" for each in everyone)), rows)


def _share(rival: Contender, cell: OverloadCell) -> str:
    known = next((each for each in cell.contenders if each.contender == rival.name), None)
    if known is None:
        return ""
    return f"{100 * known.figures.on_time:.1f}" + ("" if known.tuned or not rival.knobs else "*")


def _overload_row(cell: OverloadCell) -> list[str]:
    by_name = {each.contender: each for each in cell.contenders}
    mine, rival = by_name.get(OURS), by_name.get(cell.best_rival or "")
    ours = ("", "", "", "")
    if mine:
        at = mine.figures
        ours = (f"{100 * at.on_time:.1f}", f"{at.on_time_per_s:.0f}", str(at.switches), f"{100 * at.computing:.0f}")
    tuned = described(rival.tuned.parameters, cell.setting["mixed"]) if rival and rival.tuned else ""
    theirs, name = ("", "") if rival is None else (f"{100 * rival.figures.on_time:.1f}", f"`{rival.contender}`")
    ratios = ["" if each is None else f"{each:.2f}" for each in (cell.ratio, cell.ttft_ratio)]
    if cell.ratio is not None and cell.ratio < LEAST_RATIO:
        reason = reason_of(f"{OVERLOAD}/{cell.best_rival}")
        ratios[0] = f"{cell.ratio:.3f} **missed**, at least {LEAST_RATIO:g}: {reason}"
    if cell.ttft_ratio is not None and cell.ttft_ratio > _TTFT_OVER:
        reason = reason_of(f"{OVERLOAD}: TTFT/{cell.best_rival}", f"{OVERLOAD}: TTFT")
        ratios[1] = f"{ratios[1]} **missed**, at most {_TTFT_OVER:g}: {reason}"
    undivided = by_name.get(UNDIVIDED)
    alone = "" if undivided is None else f"{100 * undivided.figures.on_time:.1f}"
    refusing = _refusing(by_name.get(REFUSING), rival)
    return [cell.cell, *ours[:2], alone, theirs, f"{name}{tuned and f' ({tuned})'}", *ratios, *refusing, *ours[2:]]


def _refusing(mine: Measured | None, rival: Measured | None) -> tuple[str, str]:
    """Tokens on time of the contender, and its p99 of first tokens over the rival's, both of what was served."""
    if mine is None:
        return "", ""
    ratio = ttft_over(mine.figures, rival.figures) if rival else None
    return f"{100 * mine.figures.on_time:.1f}", "" if ratio is None else f"{ratio:.2f}"
