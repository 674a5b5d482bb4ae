"""The figures of a cell: each contender's median over the seeds, and the lead of ours over the best rival."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median, median_low
from typing import Any

from msgspec import Struct

from bench.simulate.cells.search import Aim, SearchResult, end_of
from bench.simulate.cells.suites import SPLIT_RIVAL, SPLITS, CellSuite, on_split
from bench.simulate.contenders import OURS
from bench.simulate.sweep import Crossing

Key = tuple[str, str, int]
"""Cell, contender, seed."""


class ContenderFigures(Struct, frozen=True):
    """`median` is one of those found, the lower of two."""

    contender: str
    median: Crossing
    found: list[SearchResult]


class CellFigures(Struct, frozen=True, omit_defaults=True):
    """`ratio`: ours over the best rival in models, the best rival over ours in GPUs, so that above 1 ours is ahead.
    None where one of them is not known, or no rival reaches the goal. `on_splits`: ours over `aegaeon`, both with as
    many prefill and decode instances as the key says."""

    cell: str
    setting: dict[str, Any]
    contenders: list[ContenderFigures]
    best_rival: str | None
    ratio: float | None
    on_splits: dict[str, float] = {}


def cell_figures(
    suite: CellSuite, cell: str, setting: dict[str, Any], known: Mapping[Key, SearchResult]
) -> CellFigures:
    contenders = []
    for contender in suite.contenders:
        of = sorted(
            (found for (where, who, _), found in known.items() if (where, who) == (cell, contender.name)),
            key=lambda found: found.seed,
        )
        if of:
            middle = median_low([end_of(found.at) for found in of])
            contenders.append(
                ContenderFigures(contender.name, next(found.at for found in of if end_of(found.at) == middle), of)
            )
    medians = {each.contender: each.median for each in contenders}
    rivals = [each.name for each in suite.contenders if each.rival and each.name in medians]
    best, ratio = _ahead(suite.aim, medians, rivals)
    return CellFigures(cell, setting, contenders, best, ratio, _on_splits(medians))


def _on_splits(medians: Mapping[str, Crossing]) -> dict[str, float]:
    pairs = {text: (medians.get(on_split(OURS, text)), medians.get(on_split(SPLIT_RIVAL, text))) for text in SPLITS}
    return {text: round(end_of(ours) / end_of(theirs), 4) for text, (ours, theirs) in pairs.items() if ours and theirs}


def _ahead(aim: Aim, medians: Mapping[str, Crossing], rivals: Iterable[str]) -> tuple[str | None, float | None]:
    if aim is Aim.MODELS:
        best = max(rivals, key=lambda name: (medians[name].below is None, end_of(medians[name])), default=None)
    else:
        reaching = (name for name in rivals if medians[name].at is not None)
        best = min(reaching, key=lambda name: end_of(medians[name]), default=None)
    if best is None or OURS not in medians:
        return best, None
    ours, theirs = end_of(medians[OURS]), end_of(medians[best])
    return best, round(ours / theirs if aim is Aim.MODELS else theirs / ours, 4)


def summary(cells: Iterable[CellFigures]) -> str:
    """The cells where there is something to compare, in a line."""
    found = list(cells)
    ratios = [cell.ratio for cell in found if cell.ratio is not None]
    if not ratios:
        return "nothing to compare yet"
    ahead = sum(ratio >= 1 for ratio in ratios)
    told = f"{OURS}: at least the best rival in {ahead} of {len(ratios)}, {median(ratios):.2f} times it in the median"
    splits = [ratio for cell in found for ratio in cell.on_splits.values()]
    if not splits:
        return told
    even = sum(ratio >= 1 for ratio in splits)
    least = f"{min(splits):.2f} times it or more"
    return f"{told}; at least {SPLIT_RIVAL} on the same split in {even} of {len(splits)}, {least}"
