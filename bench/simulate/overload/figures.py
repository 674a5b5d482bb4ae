"""The figures of a cell: what each contender has on time, and ours over the best rival."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec import Struct

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.sim.simulation import Outcome
from aegis.telemetry.records import REFUSED
from bench.simulate import figures
from bench.simulate.contenders import OURS, Contender
from bench.simulate.overload.suite import Cell
from bench.simulate.setting import Setting, pool_of, run
from bench.simulate.tuning import Parameters, Tuned, climb, with_parameters

LEAST_RATIO, MEDIAN_RATIO = 0.98, 1.15
"""Ours over the best rival: in every cell, and in the median."""


class LoadFigures(Struct, frozen=True, omit_defaults=True):
    """`on_time` of the tokens that were asked for, also as tokens for each second of the workload; `first_on_time` of
    the requests had their first token in time. Those that were `refused` are among the `failed`. TTFT is of those that
    got one. `computing` is the share of all instances' time, until the last request has ended after `makespan_s`, in
    which they computed."""

    requests: int
    failed: int
    on_time: float
    on_time_per_s: float
    first_on_time: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    switches: int
    computing: float
    makespan_s: float
    refused: int = 0


class Measured(Struct, frozen=True, omit_defaults=True):
    """`tuned`: None where there is nothing to tune. `untuned` has the defaults' tokens on time where others are
    better."""

    contender: str
    rival: bool
    figures: LoadFigures
    tuned: Tuned | None = None
    untuned: float | None = None


class OverloadCell(Struct, frozen=True):
    """`ratio`: our tokens on time over those of the best rival, `ttft_ratio` the same of the p99 of first tokens, where
    less is better. None where one of them is not known."""

    cell: str
    setting: dict[str, Any]
    seconds: int
    contenders: list[Measured]
    best_rival: str | None
    ratio: float | None
    ttft_ratio: float | None


def load_figures(outcome: Outcome, slos: Mapping[ModelId, Slo], seconds: int) -> LoadFigures:
    records, found = outcome.records, figures.figures(outcome)
    in_time = sum(
        record.first_ns is not None and record.first_ns - record.arrival_ns <= slos[record.model].ttft_ns
        for record in records
    )
    on_time = sum(record.on_time for record in records)
    return LoadFigures(
        requests=found.requests,
        failed=found.failed,
        on_time=found.attainment,
        on_time_per_s=round(on_time / seconds, 3),
        first_on_time=in_time / len(records) if records else 1.0,
        ttft_p50_ms=found.ttft_p50_ms,
        ttft_p99_ms=found.ttft_p99_ms,
        switches=found.switches,
        computing=found.utilisation,
        makespan_s=found.duration_s,
        refused=sum(record.ended == REFUSED for record in records),
    )


def measured(task: tuple[Cell, Contender, int]) -> Measured:
    """Of a contender in a cell with a seed: with the defaults, and with what a shorter run says is best. The better of
    the two counts, so that nobody loses by being tuned. Raises UserError."""
    cell, contender, seed = task
    contender, setting = cell.contender(contender, seed)
    if not contender.knobs:
        return Measured(contender.name, contender.rival, _simulated(setting, cell.seconds))
    defaults, known = contender.defaults, dict[Setting, LoadFigures]()

    def simulated(of: Setting) -> LoadFigures:
        if of not in known:
            known[of] = _simulated(of, cell.seconds)
        return known[of]

    def score(parameters: Parameters) -> float:
        return simulated(cell.shortened(with_parameters(setting, parameters))).on_time

    tuned = climb(contender.knobs, score)
    plain = simulated(with_parameters(setting, defaults))
    if tuned.parameters == defaults:
        return Measured(contender.name, contender.rival, plain, tuned)
    return better_of(contender, tuned, plain, simulated(with_parameters(setting, tuned.parameters)))


def better_of(contender: Contender, tuned: Tuned, plain: LoadFigures, other: LoadFigures) -> Measured:
    """`plain` is of the defaults and `other` of what a shorter run found to be better."""
    if other.on_time < plain.on_time:
        return Measured(contender.name, contender.rival, plain, Tuned(contender.defaults, tuned.probes))
    return Measured(contender.name, contender.rival, other, tuned, plain.on_time)


def _simulated(setting: Setting, seconds: int) -> LoadFigures:
    return load_figures(run(setting), {name: spec.slo for name, spec in pool_of(setting).named().items()}, seconds)


def compared(cell: Cell, found: Sequence[Measured]) -> OverloadCell:
    by_name = {each.contender: each.figures for each in found}
    rivals = {each.contender: each.figures for each in found if each.rival}
    best = max(rivals, key=lambda name: rivals[name].on_time, default=None)
    mine = by_name.get(OURS)
    ratio = ttft_ratio = None
    if mine and best:
        ratio = round(mine.on_time / rivals[best].on_time, 4) if rivals[best].on_time else None
        ttft_ratio = ttft_over(mine, rivals[best])
    return OverloadCell(cell.name, cell.conditions(), cell.seconds, list(found), best, ratio, ttft_ratio)


def ttft_over(mine: LoadFigures, theirs: LoadFigures) -> float | None:
    """The p99 of first tokens over that of others. None where either served nobody."""
    wait_ms, theirs_ms = mine.ttft_p99_ms, theirs.ttft_p99_ms
    return round(wait_ms / theirs_ms, 4) if wait_ms and theirs_ms else None


def summary(cells: Iterable[OverloadCell]) -> str:
    """The cells where there is something to compare, in a line."""
    ratios = {cell.cell: cell.ratio for cell in cells if cell.ratio is not None}
    if not ratios:
        return "nothing to compare yet"
    middle, least = median(ratios.values()), min(ratios.values())
    failing = next((name for name, ratio in ratios.items() if ratio < LEAST_RATIO), None)
    said = f"{OURS} over the best rival, in {len(ratios)} cells: {least:.2f} at least, {middle:.2f} in the median"
    if failing:
        return f"{said}; first cell below {LEAST_RATIO:g}: {failing}"
    return f"{said}; the median is below {MEDIAN_RATIO:g}" if middle < MEDIAN_RATIO else said
