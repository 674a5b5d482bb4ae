"""The most models that a policy can serve, or the fewest GPUs that it needs: by bisection, each step a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace as replace_fields

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.telemetry.records import Record
from bench.simulate.setting import Setting, pool_of, run
from bench.simulate.sweep import GOAL, Crossing, crossing
from bench.simulate.tuning import (
    Knob,
    Parameters,
    Tuned,
    TuningProbe,
    Value,
    climb,
    fitted,
    prefill_gpus,
    with_parameters,
)
from bench.workloads import spec

TTFT_GOAL = 0.99
"""Of GPUs: this share of first tokens on time, and of all tokens `GOAL`."""


_PREFILL_SHARE = 0.375
_NEAR = 0.15
"""Of the number at which knobs were turned: no farther away they are as good."""
_ROUNDS = 2


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


class SearchResult(Struct, frozen=True, omit_defaults=True):
    """`at`: of models on a straight line between two probes; of GPUs a whole number. `tuned`: where there was something
    to tune; what another seed was tuned to has no probes."""

    seed: int
    at: Crossing
    probes: tuple[Probe, ...]
    tuned: Tuned | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """From `start` in steps of `width` that grow, then by bisection down to `step`, of which all are multiples.

    What has `knobs` is tuned: with the defaults it is roughly found where the goal is missed, there the knobs are
    turned, and with the best ones the end is searched for. If that lies far from there, the knobs are turned once more.
    `parameters` are what another seed was tuned to."""

    aim: Aim
    setting: Setting
    start: int
    width: int
    step: int
    limit: int
    knobs: tuple[Knob, ...] = ()
    parameters: Parameters | None = None
    screen_at: int | None = None

    def found(self) -> SearchResult:
        """Raises UserError."""
        tried = _Tried(self)
        return _searched(self, tried) if self.screen_at is None else _screened(self, tried, self.screen_at)

    def placed(self, at: int, parameters: Parameters | None = None) -> Setting:
        """The simulation of `at` models or GPUs, unless said with the defaults."""
        setting = self.setting
        if self.aim is Aim.MODELS:
            assert setting.workload
            setting = replace(setting, workload=spec.override(setting.workload, "models", str(at)))
        else:
            prefill = prefill_gpus(_PREFILL_SHARE, at)
            setting = replace(setting, mixed=at, prefill=prefill, decode=at - prefill)
        return with_parameters(setting, self.defaults if parameters is None else parameters)

    @property
    def defaults(self) -> dict[str, Value]:
        return {knob.name: knob.default for knob in self.knobs}


class _Tried:
    """The simulations of a search, none of them twice."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._probes: dict[tuple[tuple[tuple[str, Value], ...], int], Probe] = {}

    def end(self, parameters: Parameters, start: int | None = None, *, step: int | None = None) -> SearchResult:
        """Where the goal is missed, from `start` on."""
        search, own = self._search, dict[int, Probe]()
        step = step or search.step

        def goes_on(at: int) -> bool:
            own[at] = self.probe(at, parameters)
            return (self.reach(own[at]) >= 1) is (search.aim is Aim.MODELS)

        width = search.width if start is None else 2 * step
        begin = min(max((start or search.start) // step * step, step), search.limit)
        low, high = boundary(goes_on, start=begin, width=width, step=step, limit=search.limit)
        at = Crossing(above=float(low)) if high is None else self._between(own, low, high)
        return SearchResult(search.setting.seed, at, tuple(own[at] for at in sorted(own)))

    def missed(self, result: SearchResult) -> int | None:
        """The fewest models, or the most GPUs, with which the goal was missed; None if it never was."""
        those = [probe.at for probe in result.probes if self.reach(probe) < 1]
        return (min if self._search.aim is Aim.MODELS else max)(those, default=None)

    def probe(self, at: int, parameters: Parameters) -> Probe:
        key = tuple(parameters.items()), at
        if key not in self._probes:
            self._probes[key] = self._simulated(at, parameters)
        return self._probes[key]

    def reach(self, probe: Probe) -> float:
        """The goal is reached from 1 on."""
        reach = probe.attainment / GOAL
        return reach if self._search.aim is Aim.MODELS else min(reach, probe.ttft_attainment / TTFT_GOAL)

    def _between(self, probes: Mapping[int, Probe], low: int, high: int) -> Crossing:
        if self._search.aim is Aim.GPUS:
            return Crossing(at=float(high))
        before = probes[low].attainment if low else 1.0
        return crossing([low, high], [before, probes[high].attainment])

    def _simulated(self, at: int, parameters: Parameters) -> Probe:
        setting = self._search.placed(at, parameters)
        if at < 2 and self._search.aim is Aim.GPUS and not pool_of(setting).mixed:
            return Probe(at, 0.0, 0.0)
        records = run(setting).records
        slos = {name: spec.slo for name, spec in pool_of(setting).named().items()}
        asked = sum(record.output_tokens for record in records)
        on_time = sum(record.on_time for record in records)
        return Probe(at, on_time / asked if asked else 1.0, ttft_attainment(records, slos))


def _searched(search: Search, tried: _Tried) -> SearchResult:
    """Raises UserError."""
    if search.parameters is not None:
        return replace_fields(tried.end(search.parameters), tuned=Tuned(dict(search.parameters), ()))
    if all(len(knob.values) == 1 for knob in search.knobs):
        return tried.end(search.defaults)
    return _tuned(search, tried)


def _screened(search: Search, tried: _Tried, at: int) -> SearchResult:
    """Where the goal is reached there, the better of what is found from there on and of what is found anyway: a curve
    may cross the goal more than once. Raises UserError."""
    if search.parameters is not None:
        turned = Tuned(dict(search.parameters), ())
    else:
        turned = _climbed(search, tried, at, search.defaults)
        turned = Tuned(turned.parameters, tuple([replace_fields(probe, at=at) for probe in turned.probes]))
    probe, tuned = tried.probe(at, turned.parameters), turned if search.knobs else None
    if tried.reach(probe) < 1:
        beyond = Crossing(below=float(at)) if search.aim is Aim.MODELS else Crossing(above=float(at))
        return SearchResult(search.setting.seed, beyond, (probe,), tuned)
    there = replace_fields(tried.end(turned.parameters, at), tuned=tuned)
    return min(_searched(search, tried), there, key=lambda found: _rank(search.aim, found.at))


def _tuned(search: Search, tried: _Tried) -> SearchResult:
    """Raises UserError."""
    aligned = not (search.start % search.width or search.limit % search.width)
    rough = found = tried.end(search.defaults, step=search.width if aligned else search.step)
    parameters: Parameters = search.defaults
    probes: list[TuningProbe] = []
    ends: list[tuple[SearchResult, Parameters]] = []
    for _ in range(_ROUNDS):
        if (missed := tried.missed(found)) is None:
            break
        turned = _climbed(search, tried, missed, parameters)
        probes += [replace_fields(probe, at=missed) for probe in turned.probes]
        if ends and turned.parameters == parameters:
            break
        parameters = turned.parameters
        found = tried.end(parameters, missed)
        ends.append((found, parameters))
        if abs(end_of(found.at) - missed) <= _NEAR * missed:
            break
    if not any(_is_beyond(search.aim, end.at, tried.missed(rough)) for end, _ in ends):
        ends.append((tried.end(search.defaults, round(end_of(rough.at))), search.defaults))
    best, parameters = min(ends, key=lambda end: _rank(search.aim, end[0].at))
    return replace_fields(best, tuned=Tuned(dict(parameters), tuple(probes)))


def _climbed(search: Search, tried: _Tried, at: int, start: Parameters) -> Tuned:
    """The best parameters with so many models or GPUs."""
    gpus = search.setting.mixed if search.aim is Aim.MODELS else at

    def score(parameters: Parameters) -> float:
        return tried.reach(tried.probe(at, parameters))

    return climb(fitted(search.knobs, gpus), score, start=start, enough=1 / GOAL)


def _is_beyond(aim: Aim, end: Crossing, missed: int | None) -> bool:
    """Whether it is certainly better than what missed the goal there."""
    if missed is None:
        return False
    return end_of(end) >= missed if aim is Aim.MODELS else end.at is not None and end.at <= missed


def _rank(aim: Aim, end: Crossing) -> tuple[bool, float]:
    """Lower is better."""
    return (False, -end_of(end)) if aim is Aim.MODELS else (end.at is None, end_of(end))


def end_of(crossing: Crossing) -> float:
    """The value of the crossing; where it is outside of what was searched, the end that it lies behind."""
    ends = (crossing.at, crossing.below, crossing.above)
    return next(end for end in ends if end is not None)


def found(search: Search) -> SearchResult:
    """Does the search: a function for processes that are given searches."""
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


def ttft_attainment(records: Iterable[Record], slos: Mapping[ModelId, Slo]) -> float:
    """A request without a first token missed it."""
    in_time = [
        record.first_ns is not None and record.first_ns - record.arrival_ns <= slos[record.model].ttft_ns
        for record in records
    ]
    return sum(in_time) / len(in_time) if in_time else 1.0
