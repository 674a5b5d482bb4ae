"""What steps cost, model by model (Aegaeon Appendix A.2, eq. 5 and 6), from the spans of runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aegis.core.ids import ModelId
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration.least_squares import Matrix, Quality, Vector, fit, quality

_CONTENTION = 0.02  # what is less is none
_CONTENTION_MAX = 4.0
_FEWEST = 10  # runs, below which nothing is fitted


@dataclass(frozen=True, slots=True)
class StepFit:
    """Nanoseconds: decode per step, context token and row; prefill per prompt, token and squared token."""

    decode: tuple[float, float, float]
    prefill: tuple[float, float, float]
    decode_quality: Quality
    prefill_quality: Quality


@dataclass(frozen=True, slots=True)
class _Runs:
    """Of one kind and model: what decides how much work they are, and for which shares of their time how many others
    were beside them."""

    features: Matrix
    shares: Matrix
    durations: Vector

    def slowed(self, contention: float) -> Matrix:
        """Features of the durations, where n others make a run `1 + contention * n` times slower."""
        pace = self.shares @ (1 / (1 + contention * np.arange(self.shares.shape[1])))
        result: Matrix = self.features / pace[:, None]
        return result


def fit_steps(spans: Sequence[Span]) -> tuple[float, dict[ModelId, StepFit]]:
    """How much longer a run takes for each other one beside it, and every model's costs, where both its prefills and
    its decode steps were seen."""
    busy = _Busy(spans)
    decodes, prefills = _runs(spans, SpanKind.DECODE, busy), _runs(spans, SpanKind.PREFILL, busy)
    contention = _contention([*decodes.values(), *prefills.values()])
    fits = {}
    for model in sorted(decodes.keys() & prefills.keys()):
        decode, prefill = decodes[model], prefills[model]
        fits[model] = StepFit(
            _costs(decode, contention),
            _costs(prefill, contention),
            quality(decode.slowed(contention), decode.durations),
            quality(prefill.slowed(contention), prefill.durations),
        )
    return contention, fits


def _costs(runs: _Runs, contention: float) -> tuple[float, float, float]:
    a, b, c = fit(runs.slowed(contention), runs.durations)
    return float(a), float(b), float(c)


class _Busy:
    """How many instances were running, at any time."""

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
        """Of the run, with no other beside it, with one, with two ..."""
        ends, length = (span.start_ns, span.stop_ns), span.stop_ns - span.start_ns
        return [float(np.diff(np.interp(ends, self._times, level))[0]) / length for level in self._levels]


def _runs(spans: Iterable[Span], kind: SpanKind, busy: _Busy) -> Mapping[ModelId, _Runs]:
    found: defaultdict[ModelId, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind is kind and span.stop_ns > span.start_ns and (span.steps or kind is SpanKind.PREFILL):
            found[span.model].append(span)
    features = _decode_features if kind is SpanKind.DECODE else _prefill_features
    return {
        model: _Runs(
            np.array([features(span) for span in these], dtype=np.float64),
            np.array([busy.shares(span) for span in these], dtype=np.float64),
            np.array([span.stop_ns - span.start_ns for span in these], dtype=np.float64),
        )
        for model, these in found.items()
        if len(these) >= _FEWEST
    }


def _decode_features(span: Span) -> tuple[float, float, float]:
    """Of all steps: their number, the cached tokens they read, and their rows."""
    steps, rows = span.steps, span.requests
    return steps, span.tokens * steps + rows * (steps * (steps - 1) // 2), rows * steps


def _prefill_features(span: Span) -> tuple[float, float, float]:
    return 1, span.tokens, (span.cached + span.tokens) ** 2 - span.cached**2


def _contention(runs: Sequence[_Runs]) -> float:
    """That with which the fits explain most: on a grid, twice refined."""
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
