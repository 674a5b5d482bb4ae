"""The most models that a policy can serve, or the fewest GPUs that it needs: by bisection, each step a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from msgspec import Struct

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.telemetry.records import Record
from bench.simulate.setting import Setting, pool_of, run
from bench.simulate.sweep import GOAL, Crossing, crossing
from bench.workloads import spec

TTFT_GOAL = 0.99
"""Of GPUs: this share of first tokens on time, and of all tokens `GOAL`."""


class Aim(Enum):
    MODELS = "the most models with 90 % of tokens on time"
    GPUS = "the fewest GPUs with 99 % of first tokens and 90 % of tokens on time"


UNITS = {Aim.MODELS: "models", Aim.GPUS: "GPUs"}
"""What is counted."""


class Probe(Struct, frozen=True):
    """A simulation with `at` models or GPUs: the shares of tokens and of first tokens that were on time, of those asked
    for."""

    at: int
    attainment: float
    ttft_attainment: float


class SearchResult(Struct, frozen=True):
    """`at`: of models on a straight line between two probes; of GPUs a whole number."""

    seed: int
    at: Crossing
    probes: tuple[Probe, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """From `start` in steps of `width` that grow, then by bisection down to `step`, of which all are multiples.
    `prefill_share` of the GPUs prefill where that is apart."""

    aim: Aim
    setting: Setting
    start: int
    width: int
    step: int
    limit: int
    prefill_share: float = 0.375

    def found(self) -> SearchResult:
        """Raises UserError."""
        probes: dict[int, Probe] = {}

        def goes_on(at: int) -> bool:
            probes[at] = self._probe(at)
            reached = probes[at].attainment >= GOAL
            if self.aim is Aim.MODELS:
                return reached
            return not reached or probes[at].ttft_attainment < TTFT_GOAL

        low, high = boundary(goes_on, start=self.start, width=self.width, step=self.step, limit=self.limit)
        at = Crossing(above=float(low)) if high is None else self._between(probes, low, high)
        return SearchResult(self.setting.seed, at, tuple(probes[at] for at in sorted(probes)))

    def placed(self, at: int) -> Setting:
        """The simulation of `at` models or GPUs."""
        if self.aim is Aim.MODELS:
            assert self.setting.workload
            return replace(self.setting, workload=spec.override(self.setting.workload, "models", str(at)))
        prefill = max(round(at * self.prefill_share), 1)
        return replace(self.setting, mixed=at, prefill=prefill, decode=at - prefill)

    def _between(self, probes: Mapping[int, Probe], low: int, high: int) -> Crossing:
        if self.aim is Aim.GPUS:
            return Crossing(at=float(high))
        before = probes[low].attainment if low else 1.0
        return crossing([low, high], [before, probes[high].attainment])

    def _probe(self, at: int) -> Probe:
        setting = self.placed(at)
        if at < 2 and self.aim is Aim.GPUS and not pool_of(setting).mixed:
            return Probe(at, 0.0, 0.0)
        records = run(setting).records
        slos = {spec.model: spec.slo for spec in pool_of(setting).specs}
        asked = sum(record.output_tokens for record in records)
        on_time = sum(record.on_time for record in records)
        return Probe(at, on_time / asked if asked else 1.0, _ttft_attainment(records, slos))


def found(search: Search) -> SearchResult:
    """For processes that are given searches."""
    return search.found()


def boundary(
    goes_on: Callable[[int], bool], *, start: int, width: int, step: int, limit: int
) -> tuple[int, int | None]:
    """Two neighbouring multiples of `step` where `goes_on` is true and no longer true; None: still true at `limit`.

    It is taken to be true of 0. Where it is true, false and true again one of its ends is found.
    """
    assert all(number % step == 0 for number in (start, width, limit)) and 0 < start <= limit and width > 0
    low, high = 0, limit
    if goes_on(start):
        low = start
        while low < limit and goes_on(min(low + width, limit)):
            low, width = min(low + width, limit), 2 * width
        if low == limit:
            return limit, None
        high = min(low + width, limit)
    else:
        high = start
        while high > width and not goes_on(high - width):
            high, width = high - width, 2 * width
        low = max(high - width, 0)
    while high - low > step:
        middle = low + (high - low) // step // 2 * step
        low, high = (middle, high) if goes_on(middle) else (low, middle)
    return low, high


def _ttft_attainment(records: Iterable[Record], slos: Mapping[ModelId, Slo]) -> float:
    """A request without a first token missed it."""
    in_time = [
        record.first_ns is not None and record.first_ns - record.arrival_ns <= slos[record.model].ttft_ns
        for record in records
    ]
    return sum(in_time) / len(in_time) if in_time else 1.0
