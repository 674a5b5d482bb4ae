"""The costs of steps, model by model (Aegaeon Appendix A.2, eq. 5 and 6), from the spans of runs.

If runs share processors, the time for which a run waits for them does not depend on its model. So if spans hold the
time for which a run had a processor, costs are fitted to that time, and the wait besides to the number of other runs
under way.

A scheduler ends a run when another batch may need its time, after a few steps or after hundreds. So an observation of
decoding is not a run but all consecutive runs of a batch that no request joins or leaves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aegis.core.ids import InstanceId, ModelId
from aegis.core.step_terms import decode_terms, prefill_terms
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration.least_squares import Matrix, Quality, Vector, fit, quality

_CONTENTION = 0.02  # a smaller one counts as none
_CONTENTION_MAX = 4.0
_OCCASION_NS = 5_000_000_000  # for about so long, or less, a machine is as slow as it is at a moment
FEWEST = 10
"""Runs of a kind, below which nothing is fitted."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """Nanoseconds of a run that no other is beside: decode per step, context token, row, and step of more than one row;
    prefill per prompt, token and squared token. Their quality is that of processor time where that is known."""

    decode: tuple[float, float, float, float]
    prefill: tuple[float, float, float]
    decode_quality: Quality
    prefill_quality: Quality


@dataclass(frozen=True, slots=True)
class _Runs:
    """Of one kind and model: what decides how much work they are, for which shares of their time how many others were
    beside them, and what they took: of a processor's time where that is known, and from their start to their end. Runs
    of one occasion were begun within `_OCCASION_NS`."""

    features: Matrix
    shares: Matrix
    durations: Vector
    walls: Vector
    occasions: Vector

    def slowed(self, contention: float) -> Matrix:
        """Features of the durations, where n others make a run `1 + contention * n` times slower."""
        pace = self.shares @ (1 / (1 + contention * np.arange(self.shares.shape[1])))
        result: Matrix = self.features / pace[:, None]
        return result


def fit_steps(spans: Sequence[Span]) -> tuple[float, dict[ModelId, StepFit]]:
    """The factor by which a run takes longer for each other one beside it, and every model's costs, if both its
    prefills and its decode steps were seen."""
    busy = _Busy(spans)
    whole = [span for span in spans if span.on_whole_device]  # on lanes, runs are as slow as their shares make them
    decodes, prefills = (_runs(whole, kind, busy) for kind in (SpanKind.DECODE, SpanKind.PREFILL))
    runs = [*decodes.values(), *prefills.values()]
    contention = _contention(runs)
    waits = _Waits.of(runs)
    fits = {}
    for model in sorted(decodes.keys() & prefills.keys()):
        decode, prefill = decodes[model], prefills[model]
        step, token, row, batch = _costs(decode, contention, waits.alone)
        prompt, linear, square = _costs(prefill, contention, waits.alone)
        fits[model] = StepFit(
            (step, token, row, batch),
            (prompt, linear, square),
            _judged(decode, contention),
            _judged(prefill, contention),
        )
    return waits.with_contention(contention), fits


def expected_ns(fit: StepFit, span: Span) -> float:
    """The time of a prefill or decode run, alone on a whole device."""
    decodes = span.kind is SpanKind.DECODE
    costs, terms = (fit.decode, _decode_features(span)) if decodes else (fit.prefill, _prefill_features(span))
    return sum(cost * term for cost, term in zip(costs, terms, strict=True))


def _costs(runs: _Runs, contention: float, factor: float) -> list[float]:
    return [float(cost) for cost in factor * fit(runs.slowed(contention), runs.durations)]


def _judged(runs: _Runs, contention: float) -> Quality:
    """By the time of a step, or a prompt, each of which counts once: decode runs end with their turn, so most are about
    as long as any other, and what differs is how many steps they had."""
    return quality(runs.slowed(contention), runs.durations, runs.features[:, 0], runs.occasions)


@dataclass(frozen=True, slots=True)
class _Waits:
    """The duration of a run, as a multiple of the processor time that it gets, while no other is under way, while one
    is ...; and the time for which each was seen."""

    factors: Vector
    lasted: Vector

    @classmethod
    def of(cls, runs: Sequence[_Runs]) -> _Waits:
        """All runs together got so much of a processor for each nanosecond with so many others beside."""
        if not runs:
            return cls(np.ones(1), np.ones(1))
        times = np.concatenate([these.shares * these.walls[:, None] for these in runs])
        lasted: Vector = times.sum(axis=0)
        had = fit(times, np.concatenate([these.durations for these in runs]))
        return cls(np.where(had > 0, 1 / np.maximum(had, 1e-12), 1.0), np.where(had > 0, lasted, 0.0))

    @property
    def alone(self) -> float:
        return float(self.factors[0])

    def with_contention(self, contention: float) -> float:
        """By how much a run is longer for each other one beside it, where its processor time is so by `contention`."""
        others = np.arange(len(self.factors))
        longer = (1 + contention * others) * self.factors / self.alone - 1
        weights = self.lasted * others
        whole = float((weights * others).sum())
        return max(float((weights * longer).sum()) / whole, 0.0) if whole else 0.0


class _Busy:
    """The number of runs that were under way, at any time."""

    def __init__(self, spans: Iterable[Span]) -> None:
        changes = Counter[int]()
        for span in spans:
            if span.kind in (SpanKind.DECODE, SpanKind.PREFILL):
                changes[span.start_ns] += 1
                changes[span.stop_ns] -= 1
        self._times = np.array(sorted(changes), dtype=np.float64)
        running = np.cumsum([changes[time] for time in sorted(changes)])[:-1]
        lasting = np.diff(self._times)
        self._levels = [
            np.concatenate([[0.0], np.cumsum(np.where(running == level, lasting, 0.0))])
            for level in range(1, max(running, default=1) + 1)
        ]  # for how long so many were running, up to each of the times

    def shares(self, span: Span) -> list[float]:
        """The shares of the run's time with no other beside it, with one, with two ..."""
        ends, length = (span.start_ns, span.stop_ns), span.stop_ns - span.start_ns
        return [float(np.diff(np.interp(ends, self._times, level))[0]) / length for level in self._levels]


class Beside:
    """What runs of other instances cost one on a lane, beside which there is one on the other lane."""

    def __init__(self, spans: Iterable[Span], contention: float) -> None:
        self._busy = _Busy(spans)
        self._contention = contention

    def slower(self, span: Span) -> float:
        shares = enumerate(self._busy.shares(span))
        pace = sum(share / (1 + self._contention * max(others - 1, 0)) for others, share in shares)
        return 1 / max(pace, 1e-9)


def observed(spans: Sequence[Span]) -> dict[ModelId, tuple[int, int]]:
    """How many prefills, and decode runs, of each model there are to fit its costs to."""
    whole = [span for span in spans if span.on_whole_device]
    prefills, decodes = (_observations(whole, kind) for kind in (SpanKind.PREFILL, SpanKind.DECODE))
    return {
        model: (len(prefills.get(model, ())), len(decodes.get(model, ()))) for model in sorted({*prefills, *decodes})
    }


def _observations(spans: Iterable[Span], kind: SpanKind) -> Mapping[ModelId, list[list[Span]]]:
    """The observations of each model: runs, or several consecutive ones that count as one."""
    found: defaultdict[ModelId, list[list[Span]]] = defaultdict(list)
    for together in (
        _steady(spans) if kind is SpanKind.DECODE else ([s] for s in spans if s.kind is kind and not s.streams)
    ):
        if all(span.stop_ns > span.start_ns for span in together):
            found[together[0].model].append(together)
    return found


def _runs(spans: Iterable[Span], kind: SpanKind, busy: _Busy) -> Mapping[ModelId, _Runs]:
    features = _decode_features if kind is SpanKind.DECODE else _prefill_features
    return {
        model: _Runs(
            np.array([np.sum([features(span) for span in these], axis=0) for these in all_of_it], dtype=np.float64),
            np.array([_shares(these, busy) for these in all_of_it], dtype=np.float64),
            np.array([sum(s.processor_ns or _length_ns(s) for s in these) for these in all_of_it], dtype=np.float64),
            np.array([sum(map(_length_ns, these)) for these in all_of_it], dtype=np.float64),
            np.array([these[0].start_ns // _OCCASION_NS for these in all_of_it], dtype=np.float64),
        )
        for model, all_of_it in _observations(spans, kind).items()
        if len(all_of_it) >= FEWEST
    }


def _steady(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Decode runs of a batch that is the same in all of them: each begins with the tokens that the one before left."""
    going_on: dict[tuple[InstanceId, ModelId], list[Span]] = {}
    for span in spans:
        if span.kind is SpanKind.DECODE and span.steps:
            batch = span.instance, span.model
            before = going_on.get(batch)
            if before and _goes_on(before[-1], span):
                before.append(span)
                continue
            if before:
                yield before
            going_on[batch] = [span]
    yield from going_on.values()


def _goes_on(before: Span, span: Span) -> bool:
    return (span.requests, span.tokens) == (before.requests, before.tokens + before.steps * before.requests)


def _length_ns(span: Span) -> int:
    return span.stop_ns - span.start_ns


def _shares(these: Sequence[Span], busy: _Busy) -> Vector:
    result: Vector = np.average([busy.shares(span) for span in these], axis=0, weights=[_length_ns(s) for s in these])
    return result


def _decode_features(span: Span) -> tuple[float, ...]:
    """Of all steps: their number, the cached tokens they read, their rows, and their number where these are several."""
    return *decode_terms(span.tokens, span.requests, span.steps), span.steps * (span.requests > 1)


def _prefill_features(span: Span) -> tuple[float, ...]:
    terms = [prefill_terms(stop, start) for start, stop in span.prompts]
    return 1, sum(tokens for tokens, _ in terms), sum(squares for _, squares in terms)


def _contention(runs: Sequence[_Runs]) -> float:
    """The contention with which the fits explain most: on a grid, twice refined."""
    best, width = _CONTENTION_MAX / 2, _CONTENTION_MAX / 2
    for _ in range(3):
        grid = [max(best + width * (step / 8), 0.0) for step in range(-8, 9)]
        best, width = min(grid, key=lambda contention: _unexplained(runs, contention)), width / 6
    return best if best >= _CONTENTION else 0.0


def _unexplained(runs: Sequence[_Runs], contention: float) -> float:
    """Squared errors, each beside what was expected, per nanosecond."""
    total, whole = 0.0, 0.0
    for these in runs:
        features = these.slowed(contention)
        expected = np.maximum(features @ fit(features, these.durations), 1.0)
        seen = np.minimum(these.durations, 5 * expected)
        total += float(((seen - expected) ** 2 / expected).sum())
        whole += float(seen.sum())
    return total / max(whole, 1.0)
