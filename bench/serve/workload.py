"""From a workload, a trace or a data set to what is sent to the served models."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.rng import Stream
from bench.serve.datasets import Sample
from bench.serve.models import Card, assign
from bench.serve.plan import Planned
from bench.serve.settings import Settings
from bench.workloads import spec, traces
from bench.workloads.arrival import Arrival
from bench.workloads.draws import gamma

_PROMPTS = 1000

Asked = Sequence[Arrival | Sample]
"""Requests before the server is known: with times and models, or without."""


def read(settings: Settings) -> Asked:
    """Raises UserError."""
    if settings.trace is not None:
        return _first(settings.num_prompts, traces.read(settings.trace, sec_multiplier=settings.sec_multiplier))
    if settings.workload is not None:
        return _first(settings.num_prompts, spec.parse(settings.workload, settings.seed))
    return settings.dataset.samples(settings.num_prompts or _PROMPTS, settings.seed)


def plan_for(settings: Settings, asked: Asked, served: Sequence[Card]) -> list[Planned]:
    """In order of time. Requests that name no model go to all the served ones in turn. Raises UserError."""
    times_ns = draw_times_ns(len(asked), settings.request_rate, settings.burstiness, settings.seed)
    names = assign({ModelId(each.model) for each in asked if each.model}, served, settings.map)
    planned = []
    for index, (each, at_ns) in enumerate(zip(asked, times_ns, strict=True)):
        model = names[ModelId(each.model)] if each.model else served[index % len(served)].model
        match each:
            case Arrival():
                planned.append(
                    Planned(each.at_ns, model, each.input_tokens, each.output_tokens, priority=each.priority)
                )
            case Sample():
                planned.append(Planned(at_ns, model, each.input_tokens, each.output_tokens, each.text))
    return planned


def draw_times_ns(count: int, rate: float, burstiness: float, seed: int) -> list[int]:
    """`count` arrivals at `rate` per second; all at once, where that is infinite.

    Gaps are drawn from a Gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier.
    """
    if isinf(rate):
        return [0] * count
    draws, at_ns, times_ns = Stream(seed, "arrivals"), 0, []
    for _ in range(count):
        at_ns += round(gamma(draws, burstiness) * 1e9 / (rate * burstiness))
        times_ns.append(at_ns)
    return times_ns


def _first(count: int | None, arrivals: list[Arrival]) -> list[Arrival]:
    if not arrivals:
        raise UserError("the workload has no requests")
    return arrivals[:count]
