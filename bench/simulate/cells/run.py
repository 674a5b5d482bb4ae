"""Running the suites that search: a result at a time into their JSON, from where an interrupted run goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from aegis.core.errors import UserError
from bench.common import result_files
from bench.simulate import plots, table
from bench.simulate.cells import show
from bench.simulate.cells.figures import CellFigures, Key, cell_figures, value
from bench.simulate.cells.search import SearchResult, found
from bench.simulate.cells.suites import Cell, CellSuite, Contender
from bench.simulate.workers import as_they_come


class Results(Struct, frozen=True):
    """What a JSON file holds."""

    suite: str
    title: str
    aim: str
    tiny: bool
    cells: list[CellFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Of the contenders with one of `policies` (none: all) those searches whose `cell/contender` has one of `only` in
    it (none: all). `again`: also those that the JSON holds."""

    seeds: tuple[int, ...]
    policies: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    again: bool = False
    jobs: int = 1


def run(suite: CellSuite, choice: Choice, *, json: Path, plot: Path) -> None:
    """Raises UserError."""
    plots.check(plot)
    chosen = _chosen(suite, choice)
    known = _held(suite, json)
    if choice.again:
        for cell, contender in chosen:
            for seed in choice.seeds:
                known.pop((cell.name, contender.name, seed), None)
    for seeds in (choice.seeds[:1], choice.seeds[1:]):
        _search(suite, chosen, seeds, choice, known, json)
    results = _results(suite, known)
    _write(json, results)
    show.show(suite, results.cells)
    figure = show.drawn(suite, results.cells)
    plots.save(figure, plot)
    table.plain_console().print(f"\n{json} and {plot} are written")


def _chosen(suite: CellSuite, choice: Choice) -> list[tuple[Cell, Contender]]:
    chosen = [
        (cell, contender)
        for cell in suite.cells
        for contender in suite.contenders
        if not choice.policies or contender.policy in choice.policies
        if not choice.only or any(text in f"{cell.name}/{contender.name}" for text in choice.only)
    ]
    if not chosen:
        last = f"{suite.cells[-1].name}/{suite.contenders[0].name}"
        raise UserError(f"--only {choice.only[0]}: is in no name of a search of {suite.name}, which are like {last}")
    return chosen


def _search(
    suite: CellSuite,
    chosen: Iterable[tuple[Cell, Contender]],
    seeds: Iterable[int],
    choice: Choice,
    known: dict[Key, SearchResult],
    json: Path,
) -> None:
    """What is not known, beginning where the first seed ended."""
    tasks, keys = [], []
    for cell, contender in chosen:
        first = known.get((cell.name, contender.name, choice.seeds[0]))
        for seed in seeds:
            if (key := (cell.name, contender.name, seed)) not in known:
                keys.append(key)
                tasks.append(suite.search(cell, contender, seed, value(first.at) if first else None))
    for at, answer in as_they_come(found, tasks, jobs=choice.jobs, title=suite.name):
        known[keys[at]] = answer
        _write(json, _results(suite, known))


# --- the file -------------------------------------------------------------------------------------------------------


def _conditions(cell: Cell) -> dict[str, Any]:
    """What a cell's results depend on, but for the contender and the seed."""
    conditions = cell.setting.conditions()
    del conditions["seed"], conditions["roles"], conditions["counted"]
    return conditions


def _results(suite: CellSuite, known: Mapping[Key, SearchResult]) -> Results:
    figures = (cell_figures(suite, cell.name, _conditions(cell), known) for cell in suite.cells)
    return Results(suite.name, suite.title, suite.aim.value, suite.tiny, [each for each in figures if each.contenders])


def _held(suite: CellSuite, json: Path) -> dict[Key, SearchResult]:
    """Of a run before; none where there is no file. Raises UserError where it is not of this suite or its setting."""
    if not json.exists():
        return {}
    try:
        held = msgspec.json.decode(json.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError):
        raise UserError(f"{json}: holds something else than results of --suite {suite.name}") from None
    if (held.suite, held.tiny) != (suite.name, suite.tiny):
        raise UserError(f"{json}: holds results of --suite {held.suite}{' --tiny' if held.tiny else ''}")
    settings = {cell.name: _conditions(cell) for cell in suite.cells}
    known: dict[Key, SearchResult] = {}
    for cell in held.cells:
        if settings.get(cell.cell) != cell.setting:
            raise UserError(f"{json}: {cell.cell} was simulated with other settings; name another file")
        for each in cell.contenders:
            known |= {(cell.cell, each.contender, answer.seed): answer for answer in each.found}
    return known


def _write(json: Path, results: Results) -> None:
    """So that an end at any time leaves a whole file."""
    part = json.with_name(f"{json.name}.part")
    result_files.write_json(part, results)
    try:
        part.replace(json)
    except OSError as error:
        raise UserError(f"cannot write {json}: {error.strerror}") from None
