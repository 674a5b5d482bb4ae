"""A look at what a proxy's requests want of the pool, for placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from aegis.core.estimators import Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.model import ModelSpec
from proxy.routing.decode_lists import DecodeLists
from proxy.routing.placement_views import PlacedLoad
from proxy.routing.sessions import Session

_MILLION = 1_000_000


class ModelSample(Struct, frozen=True):
    """A model that serves. `requests` and `prompt_tokens` have come since the start; a prompt takes `job_ns`, and each
    million of its tokens `million_tokens_ns`."""

    model: ModelId
    weight_bytes: int
    token_bytes: int
    tbt_ns: int
    requests: int
    prompt_tokens: int
    job_ns: int
    million_tokens_ns: int


class Arrivals:
    """The requests that came to one proxy, counted by model."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[ModelId, tuple[int, int]] = {}

    def add(self, model: ModelId, prompt_tokens: int) -> None:
        requests, tokens = self._counts.get(model, (0, 0))
        self._counts[model] = (requests + 1, tokens + prompt_tokens)

    def of(self, model: ModelId) -> tuple[int, int]:
        """How many requests, and the tokens of their prompts."""
        return self._counts.get(model, (0, 0))

    def forget(self, model: ModelId) -> None:
        self._counts.pop(model, None)


def model_samples(
    specs: Mapping[ModelId, ModelSpec], latency: Mapping[ModelId, Latency], arrivals: Arrivals
) -> tuple[ModelSample, ...]:
    """All models that serve."""
    return tuple([_sample(spec, latency[model], *arrivals.of(model)) for model, spec in specs.items()])


def _sample(spec: ModelSpec, latency: Latency, requests: int, prompt_tokens: int) -> ModelSample:
    return ModelSample(
        model=spec.model,
        weight_bytes=spec.manifest.image_bytes,
        token_bytes=spec.manifest.kv.token_bytes,
        tbt_ns=spec.slo.tbt_ns,
        requests=requests,
        prompt_tokens=prompt_tokens,
        job_ns=latency.prefills_ns(1, 0, 0),
        million_tokens_ns=latency.prefills_ns(0, _MILLION, 0),
    )


def loads_of(lists: DecodeLists, sessions: Mapping[RequestId, Session]) -> dict[InstanceId, tuple[PlacedLoad, ...]]:
    """What requests want of each instance that decodes."""
    requests, ahead = Counter[tuple[InstanceId, ModelId]](), Counter[tuple[InstanceId, ModelId]]()
    largest: dict[tuple[InstanceId, ModelId], int] = {}
    for request, session in sessions.items():
        if session.decode is not None:
            there, placed = (session.decode, session.job.model), lists.placed_tokens(session.decode, request)
            tokens = len(session.job.prompt) + len(session.sent)
            requests[there] += 1
            ahead[there] += tokens - placed
            largest[there] = max(largest.get(there, 0), tokens)

    def seen(instance: InstanceId, load: PlacedLoad) -> PlacedLoad:
        there = instance, load.model
        if load.requests > requests[there]:
            return load  # of those of other proxies that is not known
        return load._replace(ahead_tokens=ahead[there], largest_tokens=largest.get(there, 0))

    return {name: tuple([seen(name, load) for load in lists.placed_loads(name)]) for name in lists.instances()}
