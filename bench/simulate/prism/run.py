"""Running the suites of Prism's evaluation: as tables, JSON and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.table import Table

from aegis.core.errors import UserError
from bench.common import result_files
from bench.simulate import plot_files, table
from bench.simulate.prism.claims import Claim, claims, lines
from bench.simulate.prism.figures import measured, timeline
from bench.simulate.prism.suite import Cell, Form, PrismSuite
from bench.simulate.setting import run as run_setting
from bench.simulate.workers import each

_TITLES = ("first, %", "pace, %", "tokens/s", "TTFT p50, ms", "p99, ms", "moves", "imbalance, %", "failed")


class Activation(Struct, frozen=True):
    """How long its weights took to come, and the first request to its first token."""

    weights_gb: float
    load_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is simulated: the cells whose PANEL/CONTENDER has one of `only` in it; all, if there is none."""

    tiny: bool = False
    seed: int = 0
    jobs: int = 1
    as_published: bool = False
    only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Task:
    cell: Cell
    form: Form
    choice: Choice


def run(suite: PrismSuite, choice: Choice, *, json: Path, plot: Path) -> None:
    """Raises UserError."""
    result_files.check(json)
    plot_files.check(plot)
    cells = [cell for cell in suite.cells(tiny=choice.tiny) if _is_wanted(cell, choice)]
    if not cells:
        raise UserError(f"--only {choice.only[0]}: nothing of --suite {suite.name} is called so")
    results: list[Any] = each(
        found, [_Task(cell, suite.form, choice) for cell in cells], jobs=choice.jobs, title=suite.name
    )
    written = [
        {
            "panel": cell.panel.name,
            "title": cell.panel.title,
            "key": cell.panel.key,
            "at": float(cell.at),
            "contender": cell.contender.name,
            "result": msgspec.to_builtins(result),
        }
        for cell, result in zip(cells, results, strict=True)
    ]
    said = [] if choice.only or choice.tiny else claims(suite.name, written)
    settings = {panel.name: _conditions(panel) for panel in suite.panels}
    content = {
        "suite": suite.name,
        "title": suite.title,
        "form": suite.form.name.lower(),
        "tiny": choice.tiny,
        "as_published": choice.as_published,
        "seed": choice.seed,
        "settings": settings,
        "claims": [msgspec.to_builtins(claim) for claim in said],
        "cells": written,
    }
    result_files.write_json(json, content)
    show(suite, written, said)
    draw(suite, written, plot)
    table.plain_console().print(f"\n{json} and {plot} are written")


def found(task: _Task) -> Any:
    """Does the task: a function for processes that are given tasks. Raises UserError."""
    choice = task.choice
    setting = task.cell.setting(seed=choice.seed, tiny=choice.tiny, as_published=choice.as_published)
    match task.form:
        case Form.SHARES:
            return measured(setting)
        case Form.TIMELINE:
            return timeline(setting)
        case Form.ACTIVATION:
            outcome = run_setting(setting)
            switch, record = outcome.switches[0], outcome.records[0]
            assert record.first_ns is not None
            return Activation(
                round(switch.nbytes / 1e9, 2),
                round(switch.copy_ns / 1e9, 3),
                round((record.first_ns - record.arrival_ns) / 1e9, 3),
            )


def _is_wanted(cell: Cell, choice: Choice) -> bool:
    name = f"{cell.panel.name}/{cell.contender.name}"
    return not choice.only or any(text in name for text in choice.only)


def _conditions(panel: Any) -> dict[str, Any]:
    conditions: dict[str, Any] = panel.setting.conditions()
    if panel.setting.trace:
        conditions["trace"] = Path(panel.setting.trace).name
    return conditions | {"ttft_scale": panel.ttft_scale, "tpot_scale": panel.tpot_scale}


# --- a table --------------------------------------------------------------------------------------------------------


def show(suite: PrismSuite, cells: Sequence[dict[str, Any]], said: Sequence[Claim]) -> None:
    """A row for each cell, then what the paper says."""
    console = table.plain_console()
    shown = Table(box=None, pad_edge=False)
    for title in ("", "", "contender"):
        shown.add_column(title)
    for title in _titles(suite.form):
        shown.add_column(title, justify="right")
    for cell in cells:
        shown.add_row(
            cell["panel"], f"{cell['key']} {cell['at']:g}", cell["contender"], *row(suite.form, cell["result"])
        )
    console.print(suite.title, shown, "", sep="\n")
    for claim in said:
        held = "not told" if claim.held is None else "held" if claim.held else "MISSED"
        console.print(f"{held}: {claim.says}: {claim.found}")


def _titles(form: Form) -> tuple[str, ...]:
    match form:
        case Form.SHARES:
            return _TITLES
        case Form.TIMELINE:
            return "tokens/s, mean", "K tokens of KV, most"
        case Form.ACTIVATION:
            return "weights, GB", "load, s", "first token, s"


def row(form: Form, result: dict[str, Any]) -> tuple[str, ...]:
    match form:
        case Form.SHARES:
            return (
                f"{100 * result['ttft']:.1f}",
                f"{100 * result['tpot']:.1f}",
                f"{result['tokens_per_s']:.0f}",
                f"{result['ttft_p50_ms']:.0f}",
                f"{result['ttft_p99_ms']:.0f}",
                str(result["moves"]),
                f"{100 * result['imbalance']:.0f}",
                str(result["failed"]),
            )
        case Form.TIMELINE:
            made, held = result["tokens_per_s"], result["kv_ktokens"]
            return f"{sum(made) / len(made):.0f}", f"{max(held):.1f}"
        case Form.ACTIVATION:
            return f"{result['weights_gb']:g}", f"{result['load_s']:.3f}", f"{result['first_token_s']:.3f}"


# --- a plot ---------------------------------------------------------------------------------------------------------


def draw(suite: PrismSuite, cells: Sequence[dict[str, Any]], plot: Path) -> None:
    panels = {name: list(group) for name, group in groupby(cells, key=lambda cell: cell["panel"])}
    wide = {Form.SHARES: 2, Form.TIMELINE: 2, Form.ACTIVATION: 1}[suite.form]
    figure, axes = plot_files.sheet(wide * len(panels), suite.title)
    places = iter(axes)
    for name, group in panels.items():
        key, title = group[0]["key"], group[0]["title"]
        match suite.form:
            case Form.SHARES:
                for share, label in (("ttft", "first tokens in time, %"), ("tpot", "answers that keep the pace, %")):
                    plot_files.shares(next(places), lines(group, name, share), key, title, label)
            case Form.TIMELINE:
                for told, label in (("tokens_per_s", "tokens per second"), ("kv_ktokens", "thousand tokens of KV")):
                    found = {cell["contender"]: cell["result"][told] for cell in group}
                    plot_files.series(next(places), found, group[0]["result"]["every_s"], title, label)
            case Form.ACTIVATION:
                loads = {cell["contender"]: cell["result"]["load_s"] for cell in group}
                plot_files.bars(next(places), loads, "seconds")
    plot_files.save(figure, plot)
