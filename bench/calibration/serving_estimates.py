"""How well the estimators that serve (`aegis.core.estimators.Latency`) predict what a server did.

They learn online, on every instance, from the same runs that spans tell of. So each run is predicted by what its
instance had learned from the runs before it, and learned from afterwards, as the instance's core does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId
from aegis.core.model import ModelSpec
from aegis.core.step_terms import decode_terms
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration.least_squares import Quality, judged

_FIRST = 10  # runs of a model on an instance, before which what is believed of the hardware decides


@dataclass(frozen=True, slots=True)
class ServingQuality:
    """The quality of one model's estimates, over all instances. Durations are from start to end, as a server learns
    them."""

    decode: Quality
    prefill: Quality


@dataclass(frozen=True, slots=True)
class _Prediction:
    """The prediction for a run of `parts` steps or prompts."""

    expected_ns: int
    seen_ns: int
    parts: int


def serving_quality(spans: Iterable[Span], models: Iterable[ModelSpec]) -> dict[ModelId, ServingQuality]:
    """Of each model that had prefills and decode runs."""
    found: Mapping[tuple[ModelId, SpanKind], list[_Prediction]] = defaultdict(list)
    specs = {spec.model: spec for spec in models}
    for model, kind, prediction in _predictions(spans, specs):
        found[model, kind].append(prediction)
    kinds = (SpanKind.DECODE, SpanKind.PREFILL)
    return {
        model: ServingQuality(*(_judged(found[model, kind]) for kind in kinds))
        for model in sorted(specs)
        if all(found[model, kind] for kind in kinds)
    }


def _predictions(
    spans: Iterable[Span], specs: Mapping[ModelId, ModelSpec]
) -> Iterator[tuple[ModelId, SpanKind, _Prediction]]:
    latencies: dict[tuple[InstanceId, ModelId], Latency] = {}
    seen: defaultdict[tuple[InstanceId, ModelId, SpanKind], int] = defaultdict(int)
    for span in sorted(spans, key=lambda span: (span.stop_ns, span.start_ns)):
        if span.model not in specs or span.stop_ns <= span.start_ns or not _is_run(span):
            continue
        key = span.instance, span.model
        latency = latencies.setdefault(key, Latency(specs[span.model].manifest, Hardware()))
        prediction = _predicted(span, latency)
        seen[*key, span.kind] += 1
        if seen[*key, span.kind] > _FIRST:
            yield span.model, span.kind, prediction


def _is_run(span: Span) -> bool:
    """On the whole device: estimates are of that."""
    runs = span.kind is SpanKind.PREFILL or (span.kind is SpanKind.DECODE and span.steps > 0)
    return runs and span.on_whole_device


def _predicted(span: Span, latency: Latency) -> _Prediction:
    """Before the run is learned from, and then it is."""
    duration_ns = span.stop_ns - span.start_ns
    if span.kind is SpanKind.PREFILL:
        beside_ns = latency.beside_ns(span.stream_tokens, span.streams)
        (start, stop), *joined = span.prompts
        expected_ns = latency.prefill_ns(stop, start) + sum(latency.joined_ns(stop, start) for start, stop in joined)
        latency.saw_step(span.prompts, max(duration_ns - beside_ns, 1))
        return _Prediction(expected_ns + beside_ns, duration_ns, len(span.prompts))
    steps, read, _ = decode_terms(span.tokens, span.requests, span.steps)
    context_tokens = read // steps
    expected_ns = latency.decode_ns(context_tokens, span.requests) * steps
    latency.saw_decode(context_tokens, duration_ns // steps, span.requests)
    return _Prediction(expected_ns, duration_ns, steps)


def _judged(predictions: Sequence[_Prediction]) -> Quality:
    expected, durations, parts = (
        np.array([getattr(each, name) for each in predictions], dtype=np.float64)
        for name in ("expected_ns", "seen_ns", "parts")
    )
    return judged(expected, durations, parts)
