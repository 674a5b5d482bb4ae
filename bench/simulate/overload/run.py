"""Running the suite `overload`: a result at a time into its JSON, from where an interrupted run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.table import Table

from aegis.core.errors import UserError
from bench.common import result_files
from bench.common.provenance import Provenance
from bench.simulate import plot_files, table
from bench.simulate.contenders import OURS, Contender
from bench.simulate.overload.figures import Measured, OverloadCell, compared, measured, summary
from bench.simulate.overload.suite import NAME, Cell, OverloadSuite
from bench.simulate.tuning import described
from bench.simulate.workers import as_they_come

_Key = tuple[str, str]
"""Cell, contender."""
_RIGHT = (
    "on time, %",
    "tokens/s",
    "first, %",
    "TTFT p50, s",
    "TTFT p99, s",
    "switches",
    "computing, %",
    "makespan, s",
    "refused",
)


class Results(Struct, frozen=True, omit_defaults=True):
    """The contents of a JSON file. One that is kept in `bench/results` has a head, `measured`."""

    suite: str
    title: str
    tiny: bool
    seed: int
    summary: str
    cells: list[OverloadCell]
    measured: Provenance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Of the contenders with one of `policies` (none: all) those whose `cell/contender` has one of `only` in it (none:
    all). `again`: also those that the JSON holds."""

    seed: int = 0
    policies: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    again: bool = False
    jobs: int = 1


def run(suite: OverloadSuite, choice: Choice, *, json: Path, plot: Path) -> None:
    """Raises UserError."""
    result_files.check(json)
    plot_files.check(plot)
    chosen = _chosen(suite, choice)
    held = _held(suite, choice.seed, json)
    known = {(cell.cell, each.contender): each for cell in (held.cells if held else ()) for each in cell.contenders}
    if choice.again:
        for cell, contender in chosen:
            known.pop((cell.name, contender.name), None)
    origin = held.measured if held and known else None  # the oldest code that any of it is of
    if suite.missing:
        table.plain_console().print(
            f"cells of traces that --trace-dir has not are left out: {', '.join(suite.missing)}"
        )
    asked = [(cell, contender) for cell, contender in chosen if (cell.name, contender.name) not in known]
    tasks = [(cell, contender, choice.seed) for cell, contender in asked]
    for at, answer in as_they_come(measured, tasks, jobs=choice.jobs, title=NAME):
        cell, contender = asked[at]
        known[cell.name, contender.name] = answer
        result_files.write_json(json, _results(suite, choice.seed, known, origin))
    results = _results(suite, choice.seed, known, origin)
    result_files.write_json(json, results)
    show(suite, results.cells)
    plot_files.save(plot_files.overload(suite.title, results.cells), plot)
    table.plain_console().print(f"\n{json} and {plot} are written")


def show(suite: OverloadSuite, cells: Sequence[OverloadCell]) -> None:
    """A row for each contender and cell, ours first, and what it comes to."""
    shown = Table(box=None, pad_edge=False)
    for title in ("", "contender", *_RIGHT, "tuned"):
        shown.add_column(title, justify="right" if title in _RIGHT else "left")
    for cell in cells:
        for index, each in enumerate(cell.contenders):
            shown.add_row("" if index else cell.cell, each.contender, *_row(each, cell.setting["mixed"]))
    ratios = Table(box=None, pad_edge=False)
    for title in ("", f"{OURS}, %", "best rival, %", "", "ratio", "TTFT p99 over its"):
        ratios.add_column(title, justify="left" if title == "" else "right")
    for cell in cells:
        shares = {each.contender: f"{100 * each.figures.on_time:.1f}" for each in cell.contenders}
        best = cell.best_rival or "-"
        ratio, ttft = ("-" if each is None else f"{each:.2f}" for each in (cell.ratio, cell.ttft_ratio))
        ratios.add_row(cell.cell, shares.get(OURS, "-"), shares.get(best, "-"), best, ratio, ttft)
    table.plain_console().print(suite.title, shown, "", ratios, "", summary(cells), sep="\n")


def _row(each: Measured, gpus: int) -> tuple[str, ...]:
    figures = each.figures
    waits = ("-" if ms is None else f"{ms / 1e3:.2f}" for ms in (figures.ttft_p50_ms, figures.ttft_p99_ms))
    return (
        f"{100 * figures.on_time:.1f}",
        f"{figures.on_time_per_s:.0f}",
        f"{100 * figures.first_on_time:.1f}",
        *waits,
        str(figures.switches),
        f"{100 * figures.computing:.1f}",
        f"{figures.makespan_s:.0f}",
        str(figures.refused),
        described(each.tuned.parameters, gpus) if each.tuned else "",
    )


def _chosen(suite: OverloadSuite, choice: Choice) -> list[tuple[Cell, Contender]]:
    pairs = list(suite.pairs())
    chosen = [
        (cell, contender)
        for cell, contender in pairs
        if not choice.policies or contender.policy in choice.policies
        if not choice.only or any(text in f"{cell.name}/{contender.name}" for text in choice.only)
    ]
    if not chosen:
        last = f"{pairs[-1][0].name}/{OURS}"
        raise UserError(f"--only {choice.only[0]}: is in no name of a search of {NAME}, which are like {last}")
    return chosen


# --- the file -------------------------------------------------------------------------------------------------------


def _results(suite: OverloadSuite, seed: int, known: Mapping[_Key, Measured], origin: Provenance | None) -> Results:
    cells = []
    for cell in suite.cells:
        keys = [(cell.name, contender.name) for contender in suite.contenders]
        if found := [known[key] for key in keys if key in known]:
            cells.append(compared(cell, found))
    return Results(NAME, suite.title, suite.tiny, seed, summary(cells), cells, origin)


def _held(suite: OverloadSuite, seed: int, json: Path) -> Results | None:
    """Of a run before; None if there is no file. Raises UserError if it is not of this suite or its setting."""
    if not json.exists():
        return None
    try:
        held = msgspec.json.decode(json.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError):
        raise UserError(f"{json}: holds something else than results of --suite {NAME}") from None
    if (held.suite, held.tiny, held.seed) != (NAME, suite.tiny, seed):
        tiny = " --tiny" if held.tiny else ""
        raise UserError(f"{json}: holds results of --suite {held.suite}{tiny} --seed {held.seed}; name another file")
    conditions = {cell.name: msgspec.to_builtins(cell.conditions()) for cell in suite.cells}
    for cell in held.cells:
        if conditions.get(cell.cell) != cell.setting:
            raise UserError(f"{json}: {cell.cell} was simulated with other settings; name another file")
    return held
