"""The measurements of a run, under the names that `vllm bench serve` gives them, and those that it lacks.

Means, medians, deviations and percentiles are of the requests that were answered. TTFT, TPOT and E2EL count from when a
request was sent; an ITL is the time from one chunk with tokens to the next. Attainment (Aegaeon §2.1) counts from when
a request was to be sent, and a request that failed has missed all the tokens that it asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from bench.serve.plan import Outcome

METRICS = ("ttft", "tpot", "itl", "e2el")
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Measures:
    """The figures to show. `goodput`: a limit in ms for each metric that a good request has to keep."""

    slo: Slo = field(default_factory=Slo)
    goodput: Mapping[str, float] | None = None
    metrics: Sequence[str] = ("ttft", "tpot", "itl")
    percentiles: Sequence[float] = (99.0,)


def summarise(outcomes: Sequence[Outcome], measures: Measures) -> dict[str, Any]:
    """All figures of a run, each model's under `per_model`."""
    duration_ns = max((outcome.stop_ns for outcome in outcomes), default=0)
    late_ms = [outcome.late_ns / 1e6 for outcome in outcomes]
    per_model: dict[ModelId, list[Outcome]] = {}
    for outcome in outcomes:
        per_model.setdefault(outcome.planned.model, []).append(outcome)
    return {
        "duration": duration_ns / 1e9,
        **_figures(outcomes, measures, duration_ns),
        "mean_lateness_ms": float(np.mean(late_ms)) if late_ms else 0.0,
        "max_lateness_ms": max(late_ms, default=0.0),
        "failures": dict(Counter(outcome.failure for outcome in outcomes if outcome.failure).most_common()),
        "per_model": {model: _figures(own, measures, duration_ns) for model, own in sorted(per_model.items())},
    }


def _figures(outcomes: Sequence[Outcome], measures: Measures, duration_ns: int) -> dict[str, Any]:
    answered = [outcome for outcome in outcomes if not outcome.failure]
    asked = sum(outcome.input_tokens for outcome in answered)
    made = sum(outcome.output_tokens for outcome in answered)
    per_s = _SECOND_NS / duration_ns if duration_ns else 0.0
    owed = sum(outcome.owed_tokens for outcome in outcomes)
    on_time = sum(outcome.on_time(measures.slo) for outcome in outcomes)
    figures = {
        "completed": len(answered),
        "failed": len(outcomes) - len(answered),
        "total_input_tokens": asked,
        "total_output_tokens": made,
        "request_throughput": len(answered) * per_s,
        "request_goodput": None,
        "output_throughput": made * per_s,
        "total_token_throughput": (asked + made) * per_s,
        "max_output_tokens_per_s": _peak_tokens_per_s(answered),
        "max_concurrent_requests": _peak_requests(outcomes),
        "slo_attainment": on_time / owed if owed else 1.0,
        "slo_tokens": owed,
        "slo_tokens_met": on_time,
    }
    if measures.goodput:
        good = sum(_is_good(outcome, measures.goodput) for outcome in answered)
        figures["request_goodput"] = good * per_s
    for metric in measures.metrics:
        figures |= _spread(metric, _values_ms(metric, answered), measures.percentiles)
    return figures


def _values_ms(metric: str, answered: Sequence[Outcome]) -> list[float]:
    match metric:
        case "ttft":
            return [outcome.ttft_ns / 1e6 for outcome in answered]
        case "tpot":
            return [outcome.tpot_ns / 1e6 for outcome in answered if outcome.output_tokens > 1]
        case "e2el":
            return [outcome.e2el_ns / 1e6 for outcome in answered]
    chunks = (sorted(set(outcome.token_times_ns)) for outcome in answered)
    return [(after - before) / 1e6 for times in chunks for before, after in pairwise(times)]


def _spread(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = values or [0.0]
    told = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    told |= {f"p{percentile:g}": np.percentile(values, percentile) for percentile in percentiles}
    return {f"{name}_{metric}_ms": float(value) for name, value in told.items()}


def _is_good(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    own_ms = {"ttft": outcome.ttft_ns / 1e6, "tpot": outcome.tpot_ns / 1e6, "e2el": outcome.e2el_ns / 1e6}
    return all(own_ms[metric] <= limit for metric, limit in limits_ms.items())


def _peak_tokens_per_s(answered: Sequence[Outcome]) -> float:
    seconds = Counter(token_ns // _SECOND_NS for outcome in answered for token_ns in outcome.token_times_ns)
    return float(max(seconds.values(), default=0))


def _peak_requests(outcomes: Sequence[Outcome]) -> int:
    """The most that were under way at one time."""
    steps = sorted(step for each in outcomes for step in ((each.sent_ns, 1), (each.stop_ns, -1)))
    peak = running = 0
    for _, step in steps:
        running += step
        peak = max(peak, running)
    return peak
