"""Running the suites that search: a result at a time into their JSON, from where an interrupted run goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.table import Table

from aegis.core.errors import UserError
from bench.common import result_files
from bench.common.provenance import Provenance
from bench.simulate import plot_files, table
from bench.simulate.cells.figures import CellFigures, Key, cell_figures, summary
from bench.simulate.cells.search import UNITS, Aim, SearchResult, end_of, found
from bench.simulate.cells.suites import SPLITS, Cell, CellSuite
from bench.simulate.contenders import OURS, Contender
from bench.simulate.tuning import described
from bench.simulate.workers import as_they_come


def show(suite: CellSuite, cells: Sequence[CellFigures]) -> None:
    """A row for each contender and cell, ours first, and what it comes to."""
    shown = Table(box=None, pad_edge=False)
    for title in ("", "contender", UNITS[suite.aim], "of each seed", "tuned"):
        shown.add_column(title, justify="right" if title == UNITS[suite.aim] else "left")
    for cell in cells:
        for index, each in enumerate(cell.contenders):
            seeds = ", ".join(str(found.at) for found in each.found)
            tuned = next((described(found.tuned.parameters, suite.gpus) for found in each.found if found.tuned), "")
            shown.add_row("" if index else cell.cell, each.contender, str(each.median), seeds, tuned)
    ratios = Table(box=None, pad_edge=False)
    splits = [text for text in SPLITS if any(text in cell.on_splits for cell in cells)]
    for title in ("", OURS, "best rival", "", "ratio", *splits):
        ratios.add_column(title, justify="left" if title in ("", "best rival") else "right")
    for cell in cells:
        medians = {each.contender: str(each.median) for each in cell.contenders}
        ratio = "-" if cell.ratio is None else f"{cell.ratio:.2f}"
        best = cell.best_rival or "-"
        even = (f"{cell.on_splits[text]:.2f}" if text in cell.on_splits else "-" for text in splits)
        ratios.add_row(cell.cell, medians.get(OURS, "-"), medians.get(best, "-"), best, ratio, *even)
    table.plain_console().print(suite.title, shown, "", ratios, "", summary(cells), sep="\n")


class Results(Struct, frozen=True, omit_defaults=True):
    """The contents of a JSON file. One that is kept in `bench/results` has a head, `measured`."""

    suite: str
    title: str
    aim: str
    tiny: bool
    cells: list[CellFigures]
    measured: Provenance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Of the contenders with one of `policies` (none: all) those searches whose `cell/contender` has one of `only` in
    it (none: all). `again`: also those that the JSON holds. `screen`: a rival that misses the goal where the best one
    that the JSON holds ends is searched no further."""

    seeds: tuple[int, ...]
    policies: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    again: bool = False
    screen: bool = False
    jobs: int = 1


def run(suite: CellSuite, choice: Choice, *, json: Path, plot: Path) -> None:
    """Raises UserError."""
    result_files.check(json)
    plot_files.check(plot)
    chosen = _chosen(suite, choice)
    held = _held(suite, json)
    known = _known(suite, held, json, again=choice.again)
    if choice.again:
        for cell, contender in chosen:
            for seed in choice.seeds:
                known.pop((cell.name, contender.name, seed), None)
    measured = held.measured if held and known else None  # the oldest code that any of it is of

    def write() -> Results:
        results = _results(suite, known, measured)
        result_files.write_json(json, results)
        return results

    for seeds in (choice.seeds[:1], choice.seeds[1:]):
        for key, answer in _search(suite, chosen, seeds, choice, known):
            known[key] = answer
            write()
    results = write()
    show(suite, results.cells)
    plot_files.save(plot_files.cells(suite, results.cells), plot)
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
    known: Mapping[Key, SearchResult],
) -> Iterator[tuple[Key, SearchResult]]:
    """Searches for the unknown results, beginning where the first seed ended, and yields each as it is found."""
    tasks, keys = [], []
    for cell, contender in chosen:
        first = known.get((cell.name, contender.name, choice.seeds[0]))
        for seed in seeds:
            if (key := (cell.name, contender.name, seed)) not in known:
                keys.append(key)
                parameters = first.tuned.parameters if first and first.tuned else None
                hint = end_of(first.at) if first else None
                screen_at = _best(suite, cell, seed, known) if choice.screen and contender.rival else None
                tasks.append(suite.search(cell, contender, seed, hint, parameters, screen_at))
    for at, answer in as_they_come(found, tasks, jobs=choice.jobs, title=suite.name):
        yield keys[at], answer


def _best(suite: CellSuite, cell: Cell, seed: int, known: Mapping[Key, SearchResult]) -> float | None:
    """Where the best rival ended; None if none was searched to its end."""
    keys = [(cell.name, each.name, seed) for each in suite.contenders if each.rival]
    ends = [known[key].at.at for key in keys if key in known]
    reached = [end for end in ends if end is not None]
    return (max if suite.aim is Aim.MODELS else min)(reached, default=None)


# --- the file -------------------------------------------------------------------------------------------------------


def _conditions(cell: Cell) -> dict[str, Any]:
    """The conditions that a cell's results depend on, but for the contender and the seed."""
    conditions = cell.setting.conditions()
    del conditions["seed"], conditions["roles"], conditions["counted"]
    del conditions["max_batch"], conditions["budget_tokens"]
    if conditions["lanes"] is None:  # older files do not say it
        del conditions["lanes"]
    return conditions


def _results(suite: CellSuite, known: Mapping[Key, SearchResult], measured: Provenance | None) -> Results:
    figures = (cell_figures(suite, cell.name, _conditions(cell), known) for cell in suite.cells)
    found = [each for each in figures if each.contenders]
    return Results(suite.name, suite.title, suite.aim.value, suite.tiny, found, measured)


def _held(suite: CellSuite, json: Path) -> Results | None:
    """Of a run before; None if there is no file. Raises UserError if it is not of this suite or its setting."""
    if not json.exists():
        return None
    try:
        held = msgspec.json.decode(json.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError):
        raise UserError(f"{json}: holds something else than results of --suite {suite.name}") from None
    if (held.suite, held.tiny) != (suite.name, suite.tiny):
        raise UserError(f"{json}: holds results of --suite {held.suite}{' --tiny' if held.tiny else ''}")
    settings = {cell.name: _conditions(cell) for cell in suite.cells}
    for cell in held.cells:
        if settings.get(cell.cell) != cell.setting:
            raise UserError(f"{json}: {cell.cell} was simulated with other settings; name another file")
    return held


def _known(suite: CellSuite, held: Results | None, json: Path, *, again: bool) -> dict[Key, SearchResult]:
    """Raises UserError where contenders were not tuned that are now, unless they are left out `again`."""
    known = {
        (cell.cell, each.contender, answer.seed): answer
        for cell in (held.cells if held else ())
        for each in cell.contenders
        for answer in each.found
    }
    tuned = {contender.name for contender in suite.contenders if contender.knobs}
    untuned = [key for key, answer in known.items() if key[1] in tuned and answer.tuned is None]
    if untuned and not again:
        cell, contender, _ = untuned[0]
        raise UserError(
            f"{json}: {contender} was not tuned there in {cell}; name another file, or search again with --again"
        )
    for key in untuned:
        del known[key]
    return known
