"""How well the estimators that serve (`aegis.core.estimators.Latency`) predict what a server did.

They learn online, on every instance, from the same runs and switches that spans tell of. So each is predicted by what
its instance had learned from those before it, and learned from afterwards, as the instance's core does.
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

KINDS = (SpanKind.PREFILL, SpanKind.DECODE, SpanKind.SWITCH)
_FIRST = 10  # of a model's on an instance, before which what is believed of the hardware decides

Qualities = Mapping[SpanKind, Quality]
"""By kind, those that were seen often enough. Durations are from start to end, as a server learns them."""


@dataclass(frozen=True, slots=True)
class ServingQuality:
    """The quality of estimates over all instances, of each model and of all of them together.

    All switches to a model copy as many bytes, so at a time there is one estimate for them: R² of one model is about 0,
    whatever the error is. That of all models says how well they are told apart."""

    models: Mapping[ModelId, Qualities]
    all: Qualities


@dataclass(frozen=True, slots=True)
class _Prediction:
    """The prediction for a run of `parts` steps or prompts, or for a switch."""

    expected_ns: int
    seen_ns: int
    parts: int = 1


def serving_quality(spans: Iterable[Span], models: Iterable[ModelSpec]) -> ServingQuality:
    found: Mapping[tuple[ModelId, SpanKind], list[_Prediction]] = defaultdict(list)
    specs = {spec.model: spec for spec in models}
    for model, kind, prediction in _predictions(spans, specs):
        found[model, kind].append(prediction)
    per_model = {
        model: {kind: _judged(found[model, kind]) for kind in KINDS if (model, kind) in found}
        for model in sorted({model for model, _ in found})
    }
    together = {kind: [each for (_, its), these in found.items() if its is kind for each in these] for kind in KINDS}
    return ServingQuality(per_model, {kind: _judged(these) for kind, these in together.items() if these})


def serving_lines(found: ServingQuality) -> Iterator[str]:
    """A line for each model and kind, and for all models."""
    rows = [*found.models.items(), *([(ModelId("all"), found.all)] if found.all else [])]
    width = max([5, *(len(name) for name, _ in rows)])
    yield f"{'model':{width}} the server's own estimates: {'seen':>6} {'R2':>6} {'typical':>8} {'in all':>7}"
    for name, qualities in rows:
        for kind, each in qualities.items():
            errors = f"{each.typical:8.1%} {each.bias:+7.1%}"
            yield f"{name:{width}} {kind:28} {each.observations:6} {each.r2:6.3f} {errors}"


def _predictions(
    spans: Iterable[Span], specs: Mapping[ModelId, ModelSpec]
) -> Iterator[tuple[ModelId, SpanKind, _Prediction]]:
    latencies: dict[tuple[InstanceId, ModelId], Latency] = {}
    seen: defaultdict[tuple[InstanceId, ModelId, SpanKind], int] = defaultdict(int)
    for span in sorted(spans, key=lambda span: (span.stop_ns, span.start_ns)):
        if span.model not in specs or span.stop_ns <= span.start_ns or not _teaches(span):
            continue
        key = span.instance, span.model
        latency = latencies.setdefault(key, Latency(specs[span.model].manifest, Hardware()))
        prediction = _predicted(span, latency)
        seen[*key, span.kind] += 1
        if seen[*key, span.kind] > _FIRST:
            yield span.model, span.kind, prediction


def _teaches(span: Span) -> bool:
    """A run on the whole device, of which estimates are, or a switch whose load began with it."""
    match span.kind:
        case SpanKind.PREFILL:
            return span.on_whole_device
        case SpanKind.DECODE:
            return span.on_whole_device and span.steps > 0
        case SpanKind.SWITCH:
            return span.copy_ns > 0
    return False


def _predicted(span: Span, latency: Latency) -> _Prediction:
    """Before it is learned from, and then it is."""
    duration_ns = span.stop_ns - span.start_ns
    if span.kind is SpanKind.SWITCH:
        expected_ns = latency.switch_ns()
        latency.saw_switch(span.copy_ns)
        return _Prediction(expected_ns, span.copy_ns)
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
