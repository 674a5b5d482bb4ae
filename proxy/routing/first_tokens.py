"""Requests that wait for their first token, by instance: how long that will take on mixed ones, and in which order they
came.

Prefill instances have queues whose loads `proxy.routing.prefill_queues` keeps. On mixed instances prefills and decode
steps take turns, and the instance decides their order; here only the amount of work is counted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from aegis.core.estimators import Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import Work


@dataclass(slots=True)
class _Sums:
    """The sums of one model, as `Latency.prefills_ns` takes them."""

    jobs: int = 0
    tokens: int = 0
    squares: int = 0

    def count(self, jobs: int, tokens: int) -> None:
        self.jobs += jobs
        self.tokens += jobs * tokens
        self.squares += jobs * tokens * tokens


@dataclass(slots=True)
class _Waiting:
    requests: list[RequestId] = field(default_factory=list)  # in order of coming
    models: defaultdict[ModelId, _Sums] = field(default_factory=lambda: defaultdict(_Sums))
    foreign_ns: int = 0  # the prefills of other proxies there


class FirstTokens:
    """The first tokens of all requests of one proxy that have a place. `latency` has every model that waits."""

    __slots__ = ("_latency", "_places", "_waiting")

    def __init__(self, latency: Mapping[ModelId, Latency]) -> None:
        self._latency = latency
        self._waiting: defaultdict[InstanceId, _Waiting] = defaultdict(_Waiting)
        self._places: dict[RequestId, tuple[InstanceId, Work | None]] = {}

    def add(self, instance: InstanceId, request: RequestId, work: Work | None = None) -> None:
        """`work` where its time is counted here: on a mixed instance."""
        waiting = self._waiting[instance]
        insort(waiting.requests, request)
        if work is not None:
            waiting.models[work.model].count(1, work.tokens)
        self._places[request] = (instance, work)

    def remove(self, request: RequestId) -> None:
        """The request has its first token, or waits no more. It may be unknown here."""
        place = self._places.pop(request, None)
        if place is None:
            return
        instance, work = place
        waiting = self._waiting[instance]
        del waiting.requests[bisect_left(waiting.requests, request)]
        if work is None:
            return
        sums = waiting.models[work.model]
        sums.count(-1, work.tokens)
        if not sums.jobs:
            del waiting.models[work.model]

    def set_foreign(self, instance: InstanceId, prefill_ns: int) -> None:
        """The time of the prefills that other proxies have placed there."""
        self._waiting[instance].foreign_ns = prefill_ns

    def before(self, request: RequestId) -> int | None:
        """The number of earlier requests that wait at the same place; None if it does not wait there."""
        if request not in self._places:
            return None
        return bisect_left(self._waiting[self._places[request][0]].requests, request)

    def own_ns(self, instance: InstanceId, active: Container[ModelId] = ()) -> int:
        """To prefill all that this proxy has waiting there; models that are not `active` are brought in for it."""
        return sum(self.by_model_ns(instance, active).values())

    def by_model_ns(self, instance: InstanceId, active: Container[ModelId] = ()) -> dict[ModelId, int]:
        """The same time for each model that waits there."""
        waiting = self._waiting.get(instance)
        return {m: self._model_ns(m, s, active) for m, s in waiting.models.items()} if waiting else {}

    def foreign_ns(self, instance: InstanceId) -> int:
        """The time of the prefills that other proxies have placed there."""
        waiting = self._waiting.get(instance)
        return waiting.foreign_ns if waiting else 0

    def _model_ns(self, model: ModelId, sums: _Sums, active: Container[ModelId]) -> int:
        latency = self._latency[model]
        switch_ns = 0 if model in active else latency.switch_ns()
        return switch_ns + latency.prefills_ns(sums.jobs, sums.tokens, sums.squares)
