"""Running MuxWise's suites: rates beside the ratios that the paper has, as a table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from aegis.core.errors import UserError
from bench.common import result_files
from bench.simulate import table
from bench.simulate.goodput import MUXWISE, GoodputResult, GoodputSuite, Panel, Search, found
from bench.simulate.workers import each

_TITLES = (
    "requests/s",
    "budget",
    "MuxWise over it",
    "published",
    "TTFT p99, s",
    "ours there",
    "gap p99, s",
    "goodput, tokens/s",
)


def run(
    suite: GoodputSuite,
    *,
    json: Path,
    tiny: bool,
    seed: int,
    jobs: int,
    as_published: bool = False,
    only: Sequence[str] = (),
) -> None:
    """`only`: panels, or contenders of a panel, whose PANEL/CONTENDER contains one of these. Raises UserError."""
    searches = [
        Search(panel=panel, contender=contender, tiny=tiny, seed=seed, as_published=as_published)
        for panel in suite.panels
        for contender in suite.contenders
        if not only or any(text in f"{panel.name}/{contender.name}" for text in only)
    ]
    if not searches:
        raise UserError(f"--only {only[0]}: nothing of --suite {suite.name} is called so")
    result_files.check(json)
    results = _results(searches, jobs=jobs, title=suite.name)
    panels = []
    for panel in suite.panels:
        of = [result for search, result in zip(searches, results, strict=True) if search.panel is panel]
        if of:
            show(panel, of, suite.title)
            panels.append(_written(panel, of))
    content = {
        "suite": suite.name,
        "title": suite.title,
        "tiny": tiny,
        "seed": seed,
        "as_published": as_published,
        "recorded": any(panel.prompts for panel in suite.panels),
        "panels": panels,
    }
    result_files.write_json(json, content)
    table.plain_console().print(f"\n{json} is written")


def _results(searches: Sequence[Search], *, jobs: int, title: str) -> list[GoodputResult]:
    """The results in the order of searches; who has the budget of another contender comes when that is tuned."""
    tuned = [search for search in searches if search.contender.budget_of is None]
    results = {
        _name(search): result for search, result in zip(tuned, each(found, tuned, jobs=jobs, title=title), strict=True)
    }
    given = []
    for search in searches:
        if search.contender.budget_of is not None:
            tuning = results.get((search.panel.name, search.contender.budget_of))
            given.append(replace(search, budget=tuning.budget if tuning else None))
    if given:
        following = zip(given, each(found, given, jobs=jobs, title=title), strict=True)
        results |= {_name(search): result for search, result in following}
    return [results[_name(search)] for search in searches]


def _name(search: Search) -> tuple[str, str]:
    return search.panel.name, search.contender.name


def ratio(results: Sequence[GoodputResult], contender: str) -> float | None:
    """MuxWise's rate over the contender's; None where one keeps no rate."""
    rates = {result.contender: result.rps for result in results}
    ours, theirs = rates.get(MUXWISE.name, 0.0), rates.get(contender, 0.0)
    return round(ours / theirs, 3) if ours and theirs else None


def show(panel: Panel, results: Sequence[GoodputResult], title: str) -> None:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for name in _TITLES:
        shown.add_column(name, justify="right")
    for result in results:
        ours, published, at = ratio(results, result.contender), panel.published.get(result.contender), result.at
        shown.add_row(
            result.contender,
            f"{result.rps:g}",
            "-" if result.budget is None else str(result.budget),
            "-" if ours is None else f"{ours:.2f}",
            "-" if published is None else f"{published:.2f}",
            _seconds(at.ttft_p99_ms if at else None),
            _seconds(result.ours_ttft_p99_ms),
            _seconds(at.tbt_p99_ms if at else None),
            "-" if at is None else f"{at.goodput_tokens_per_s:.0f}",
        )
    heading = f"{title}: {panel.name}, 99 % of gaps within {panel.tbt_ms} ms"
    table.plain_console().print(heading, shown, "", sep="\n")


def _seconds(ms: float | None) -> str:
    return "-" if ms is None else f"{ms / 1e3:.3f}"


def _written(panel: Panel, results: Sequence[GoodputResult]) -> dict[str, Any]:
    return {
        "panel": panel.name,
        "tbt_ms": panel.tbt_ms,
        "seconds": panel.seconds,
        "results": [
            {
                "contender": result.contender,
                "rps": result.rps,
                "budget_tokens": result.budget,
                "muxwise_over_it": ratio(results, result.contender),
                "published": panel.published.get(result.contender),
                "at": result.at,
                "ours_ttft_p99_ms": result.ours_ttft_p99_ms,
            }
            for result in results
        ],
    }
