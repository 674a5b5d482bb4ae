"""The work lists of the decode instances as far as the proxy knows them: the view from which placement decides.

Kept up to date like the prefill queues (`proxy.routing.prefill_queues`), and in order, for the same reasons.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.model import ModelSpec
from aegis.core.views import MAX_BATCH, PPM, Length, PlacedModels, Pressure, Share, Tail, Weights, Work
from proxy.routing.demand import NOTHING, Demand
from proxy.routing.events import ModelLoad
from proxy.routing.placement_views import PlacedLoad
from proxy.routing.sorted_lists import renew, renew_in_place

_GROWTH_NS: Final = NS_PER_S
"""How often requests are taken to have grown: by a token for each TBT that has passed, as in Prism's KV pressure."""


@dataclass(slots=True)
class _Held:
    """An instance's requests of one model. `tokens` are those of this proxy's."""

    tokens: int = 0
    requests: dict[RequestId, int] = field(default_factory=dict)  # and how many tokens
    growing: dict[RequestId, None] = field(default_factory=dict)  # of these: they make tokens
    foreign: ModelLoad | None = None  # the load of other proxies there
    share: Share | None = None


@dataclass(slots=True)
class _List:
    length: Length
    pressure: Pressure  # as it stands in order
    demand: Demand = NOTHING
    of_models: dict[ModelId, Demand] = field(default_factory=dict)  # which add up to that
    changed: dict[ModelId, None] = field(default_factory=dict)  # and what is to be asked anew
    placed_bytes: int = 0
    held: defaultdict[ModelId, _Held] = field(default_factory=lambda: defaultdict(_Held))
    models: dict[RequestId, ModelId] = field(default_factory=dict)
    placed: dict[ModelId, int] = field(default_factory=dict)  # in order of use, and the bytes of its weights
    settled: dict[ModelId, None] = field(default_factory=dict)  # models whose last request went there
    active: ModelId | None = None
    work_share: float = 1.0
    last_token_ns: int = 0


class DecodeLists:
    """The work lists of all decode instances, as far as placement cares: a `DecodeView`."""

    __slots__ = (
        "_active",
        "_by_pressure",
        "_capacity_tokens",
        "_demand_of",
        "_grown_ns",
        "_home",
        "_instances_of",
        "_lists",
        "_max_batch",
        "_repriced",
        "_shares",
        "_specs",
        "_weight_bytes",
        "by_length",
    )

    def __init__(
        self,
        capacity_tokens: Mapping[ModelId, int],
        weight_bytes: Mapping[ModelId, int] | None = None,
        demand: Callable[[ModelId, int], Demand] = lambda model, tokens: NOTHING,
        specs: Mapping[ModelId, ModelSpec] | None = None,
        *,
        max_batch: int = MAX_BATCH,
    ) -> None:
        """`capacity_tokens` of every model there are requests of: what an instance holds of its KV. `demand` says
        what requests of a model, with so many tokens in all, want of their instance, `specs` how fast they grow."""
        self.by_length: list[Length] = []
        self._by_pressure: list[Pressure] = []
        self._repriced: dict[InstanceId, None] = {}  # whose pressure has changed since it was last asked for
        self._capacity_tokens = capacity_tokens
        self._weight_bytes = {} if weight_bytes is None else weight_bytes  # one that is empty now may fill
        self._demand_of = demand
        self._specs = {} if specs is None else specs
        self._grown_ns = 0
        self._max_batch = max_batch
        self._active: defaultdict[ModelId, list[InstanceId]] = defaultdict(list)
        self._instances_of: defaultdict[ModelId, list[InstanceId]] = defaultdict(list)
        self._home: dict[ModelId, InstanceId] = {}
        self._lists: dict[InstanceId, _List] = {}
        self._shares: defaultdict[ModelId, list[Share]] = defaultdict(list)

    def __contains__(self, instance: object) -> bool:
        return instance in self._lists

    def __len__(self) -> int:
        return len(self._lists)

    def batches(self, instance: InstanceId) -> int:
        return self._lists[instance].length.batches

    def batches_of(self, model: ModelId, requests: int, tokens: int) -> int:
        """Requests with so many tokens in all make so many batches, whose size is bounded by the KV capacity of the
        device (Aegaeon Alg. 2, line 2)."""
        return max(-(-tokens // max(self._capacity_tokens[model], 1)), -(-requests // self._max_batch))

    def shares(self, model: ModelId) -> Sequence[Share]:
        return self._shares.get(model, ())

    def active_on(self, model: ModelId) -> Sequence[InstanceId]:
        return self._active.get(model, ())

    def active_at(self, instance: InstanceId) -> tuple[ModelId, ...]:
        """The running model, or the last to run, if there is one."""
        active = self._lists[instance].active
        return () if active is None else (active,)

    def work_share(self, instance: InstanceId) -> float:
        """The part of its time for which steps and prompts accounted, as it said last."""
        return self._lists[instance].work_share

    def tail(self, instance: InstanceId) -> Tail:
        known = self._lists[instance]
        model, requests = known.active, 0
        for other in reversed(known.models.values()):
            if requests and other != model:
                break
            model, requests = other, requests + 1
        return Tail(model, requests)

    def last_token_ns(self, instance: InstanceId) -> int:
        return self._lists[instance].last_token_ns

    def instances_of(self, model: ModelId) -> Sequence[InstanceId]:
        return self._instances_of.get(model, ())

    def home(self, model: ModelId) -> InstanceId | None:
        return self._home.get(model)

    @property
    def by_pressure(self) -> Sequence[Pressure]:
        self._update_pressure()
        return self._by_pressure

    def load_ppm(self, instance: InstanceId) -> int:
        self._update_pressure()
        return self._lists[instance].pressure.load_ppm

    def reload_ppm(self, model: ModelId) -> int:
        return self._demand_of(model, 0).loads_ppm

    def weights(self, model: ModelId, instance: InstanceId) -> Weights:
        self._update_pressure()
        known, own_ppm = self._lists[instance], self._demand_of(model, 0).memory_ppm
        placed, held = known.placed, known.of_models
        own_bytes = max(self.weight_bytes(model), 1)
        idle_bytes = sum([placed[other] for other in known.settled if other not in held and other != model])
        wanted_ppm = known.demand.memory_ppm + own_ppm * idle_bytes // own_bytes + (0 if model in held else own_ppm)
        there = model in held
        if not there and model in placed:
            used_ppm = known.demand.memory_ppm
            for other in reversed(placed):
                used_ppm += 0 if other in held else own_ppm * placed[other] // own_bytes
                there = other == model and used_ppm <= PPM
                if there or used_ppm > PPM:
                    break
        return Weights(there, wanted_ppm <= PPM)

    def placed_models(self, instance: InstanceId) -> PlacedModels:
        known = self._lists[instance]
        return PlacedModels(len(known.placed), known.placed_bytes)

    def weight_bytes(self, model: ModelId) -> int:
        return self._weight_bytes.get(model, 0)

    def own(self, instance: InstanceId) -> tuple[ModelLoad, ...]:
        """The requests that this proxy has placed there."""
        held = self._lists[instance].held.items()
        return tuple([ModelLoad(model, len(of.requests), of.tokens) for model, of in held if of.requests])

    def foreign(self, instance: InstanceId) -> tuple[ModelLoad, ...]:
        """The requests that other proxies have placed there."""
        return tuple([of.foreign for of in self._lists[instance].held.values() if of.foreign])

    def placed_tokens(self, instance: InstanceId, request: RequestId) -> int:
        """The tokens that the request had when it was placed there, and those that it is taken to have made since."""
        known = self._lists[instance]
        return known.held[known.models[request]].requests[request]

    def placed_loads(self, instance: InstanceId) -> tuple[PlacedLoad, ...]:
        """The requests of each model there, of all proxies, and what they want."""
        self._update_pressure()
        known = self._lists[instance]
        return tuple([_placed_load(model, held, known.of_models[model]) for model, held in known.held.items()])

    def instances(self) -> Iterable[InstanceId]:
        return self._lists

    # --- what changes them --------------------------------------------------------------------------------------------

    def up(self, instance: InstanceId) -> None:
        known = self._lists[instance] = _List(Length(0, instance), Pressure(0, 0, instance))
        insort(self.by_length, known.length)
        insort(self._by_pressure, known.pressure)

    def down(self, instance: InstanceId) -> None:
        """The instance is gone, with all that is there."""
        self.set_foreign(instance, ())
        for request in list(self._lists[instance].models):
            self.remove(instance, request)
        self.switched(instance, None)
        known = self._lists.pop(instance)
        for model in known.placed:
            self._instances_of[model].remove(instance)
            if self._home.get(model) == instance:
                del self._home[model]
        renew(self.by_length, known.length, None)
        renew(self._by_pressure, known.pressure, None)
        self._repriced.pop(instance, None)

    def worked(self, instance: InstanceId, work_share: float) -> None:
        """Steps and prompts have accounted for that share of the instance's time. Other instances may say so, too."""
        if instance in self._lists:
            self._lists[instance].work_share = work_share

    def switched(self, instance: InstanceId, model: ModelId | None) -> None:
        """The instance runs `model` now."""
        known = self._lists[instance]
        if known.active is not None:
            renew(self._active[known.active], instance, None)
        if model is not None:
            renew(self._active[model], None, instance)
        known.active = model

    def tokens_came(self, instance: InstanceId, now_ns: int) -> None:
        """Tokens came from the instance, which may be another than these."""
        known = self._lists.get(instance)
        if known:
            known.last_token_ns = now_ns

    def grow(self, now_ns: int) -> None:
        """Requests grow while they are there, and long answers take room that was not counted when they came. They grow
        by the clock, and not by the tokens that come: those of a long turn may come together at its end."""
        grown_ns = now_ns - now_ns % _GROWTH_NS
        if grown_ns <= self._grown_ns:
            return
        for known in self._lists.values():
            for model, held in known.held.items():
                if not held.growing:
                    continue
                tbt_ns = self._specs[model].slo.tbt_ns
                if tokens := grown_ns // tbt_ns - self._grown_ns // tbt_ns:
                    for request in held.growing:
                        held.requests[request] += tokens
                    held.tokens += tokens * len(held.growing)
                    self._share(known, model, held)
        self._grown_ns = grown_ns

    def forget(self, model: ModelId) -> None:
        """The model is gone, and all its requests: one of that name that comes later is another one."""
        home = self._home.pop(model, None)
        if home is not None:
            del self._lists[home].settled[model]
        for instance in self._active.pop(model, ()):
            self._lists[instance].active = None
        for instance in self._instances_of.pop(model, ()):
            known = self._lists[instance]
            if model in known.held:  # others' requests, of which they will say that they are gone
                known.held[model].foreign = None
                self._share(known, model, known.held[model])
            known.placed_bytes -= known.placed.pop(model)
            self._repriced[instance] = None
        self._shares.pop(model, None)

    def reprice(self, model: ModelId) -> None:
        """The cost of the model's steps has changed."""
        for share in self._shares.get(model, ()):
            self._lists[share.instance].changed[model] = self._repriced[share.instance] = None

    def set_foreign(self, instance: InstanceId, loads: Iterable[ModelLoad]) -> None:
        """The requests of other proxies on the instance are these now; all their models are known."""
        known = self._lists[instance]
        now = {load.model: load for load in loads}
        before = {model: held.foreign for model, held in known.held.items() if held.foreign}
        for model in dict.fromkeys([*before, *now]):
            if before.get(model) != now.get(model):
                if model in now:
                    self._note_placed(known, model)
                held = known.held[model]
                held.foreign = now.get(model)
                self._share(known, model, held)

    def add(self, instance: InstanceId, request: RequestId, work: Work) -> None:
        known = self._lists[instance]
        assert request not in known.models
        known.models[request] = work.model
        self._note_placed(known, work.model)
        self._settle(known, work.model)
        held = known.held[work.model]
        held.requests[request] = work.tokens
        held.tokens += work.tokens
        self._share(known, work.model, held)

    def makes_tokens(self, instance: InstanceId, request: RequestId) -> None:
        """The request has its first token, if it is still there."""
        known = self._lists.get(instance)
        model = known.models.get(request) if known else None
        if known and model is not None:
            known.held[model].growing[request] = None

    def remove(self, instance: InstanceId, request: RequestId) -> bool:
        """The request has left; whether it was there."""
        known = self._lists[instance]
        model = known.models.pop(request, None)
        if model is None:
            return False
        held = known.held[model]
        held.tokens -= held.requests.pop(request)
        held.growing.pop(request, None)
        self._share(known, model, held)
        return True

    def _settle(self, known: _List, model: ModelId) -> None:
        """The model's last request went there."""
        instance, before = known.length.instance, self._home.get(model)
        known.placed[model] = known.placed.pop(model)
        if before != instance:
            if before is not None:
                del self._lists[before].settled[model]
            self._home[model] = instance
            known.settled[model] = None

    def _note_placed(self, known: _List, model: ModelId) -> None:
        if model not in known.placed:
            known.placed[model] = weight_bytes = self.weight_bytes(model)
            known.placed_bytes += weight_bytes
            self._instances_of[model].append(known.length.instance)

    def _share(self, known: _List, model: ModelId, held: _Held) -> None:
        capacity, requests, shown, length = self._capacity_tokens[model], len(held.requests), held.share, known.length
        tokens = held.tokens
        if held.foreign:
            requests += held.foreign.requests
            tokens += held.foreign.tokens
        batches = self.batches_of(model, requests, tokens)
        room_tokens = batches * capacity - tokens if requests < batches * self._max_batch else 0
        held.share = Share(length.instance, requests, batches, room_tokens) if requests else None
        known.changed[model] = self._repriced[length.instance] = None
        renew_in_place(self._shares[model], shown, held.share)
        if not requests:
            del known.held[model]
        if grown := batches - (shown.batches if shown else 0):
            known.length = Length(length.batches + grown, length.instance)
            renew(self.by_length, length, known.length)

    def _update_pressure(self) -> None:
        """Done only when it is asked for: most policies never ask."""
        for instance in self._repriced:
            known = self._lists[instance]
            for model in known.changed:
                held, before = known.held.get(model), known.of_models.pop(model, NOTHING)
                tokens = held.tokens + (held.foreign.tokens if held.foreign else 0) if held else 0
                demand = self._demand_of(model, tokens) if held else NOTHING
                known.demand = known.demand.instead(before, demand)
                if held:
                    known.of_models[model] = demand
            known.changed.clear()
            shown, known.pressure = known.pressure, Pressure(known.demand.load_ppm, known.placed_bytes, instance)
            renew(self._by_pressure, shown, known.pressure)
        self._repriced.clear()


def _placed_load(model: ModelId, held: _Held, demand: Demand) -> PlacedLoad:
    foreign = held.foreign
    requests = len(held.requests) + (foreign.requests if foreign else 0)
    return PlacedLoad(model, requests, held.tokens + (foreign.tokens if foreign else 0), *demand)
