"""Placement: the instances that requests of a model go to, the moves of models between them, and the models whose
weights leave because nobody asks for them.

`on(event, now_ns) -> effects`; no clock, no I/O. A policy says what it wants of a view of the pool; here its wishes are
held against time and costs:

(1) A change is made once it has been wanted for `held_ns` without a break.
(2) One that moves requests is made if it pays for itself: over the window, the time that the most loaded device is
    relieved of is more than the copies of weights and KV take.
(3) One model moves at a time, and then none for `settled_ns`. Where requests only come to other instances, nothing is
    waited for.
(4) Weights of a model that had no request for `idle_ns` leave all instances, once, if that is wanted.

Laws: (L1) each move is answered before the next one begins; (L2) no change names an instance or a model that the last
sample has not; (L3) under constant loads changes come to an end, if the policy's do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from aegis.core.clock import NS_PER_S
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import PPM
from proxy.routing.events import ModelMoved, MoveModel, PlacesSet
from proxy.routing.placement_views import (
    Change,
    InstanceView,
    ModelView,
    PlacementPolicy,
    PlacementRules,
    PlacementView,
)
from proxy.routing.pool_sample import ModelSample

LOOK_NS = NS_PER_S
"""The time between two samples."""


class PoolSampled(Struct, frozen=True):
    """The pool as it stands: nothing is known where an instance is away, and nothing is decided then."""

    models: tuple[ModelSample, ...]
    instances: tuple[InstanceView, ...]


Event = PoolSampled | ModelMoved


class Evict(Struct, frozen=True):
    """The model's weights are to leave the instance, unless requests of it come."""

    model: ModelId
    instance: InstanceId


Effect = MoveModel | PlacesSet | Evict


@dataclass(slots=True)
class _Traffic:
    """What came for a model, as it was sampled last; `present` adds up its requests over time, in ns."""

    requests: int
    prompt_tokens: int
    present: int


class Placement:
    """The placement of one pool."""

    def __init__(self, policy: PlacementPolicy | None, hardware: Hardware, *, idle_ns: int | None = None) -> None:
        """Without a policy nothing moves. Weights of idle models leave after `idle_ns`; None: as the policy has it."""
        self._policy = policy
        self._rules = policy.rules if policy else PlacementRules()
        self._idle_ns = self._rules.idle_ns if idle_ns is None else idle_ns
        self._hardware = hardware
        self._window: deque[tuple[int, dict[ModelId, _Traffic]]] = deque()
        self._places: dict[ModelId, tuple[InstanceId, ...]] = {}
        self._evicted: set[ModelId] = set()  # since it was used last
        self._used_ns: dict[ModelId, int] = {}
        self._wanted: tuple[ModelId, tuple[InstanceId, ...]] | None = None  # what comes first
        self._since_ns = 0  # it has
        self._moving: ModelId | None = None
        self._settled_ns: int | None = None  # nothing moves before
        self.because = ""  # of the last change

    def on(self, event: Event, now_ns: int) -> list[Effect]:
        """Takes one event; returns what to do, in order."""
        match event:
            case ModelMoved(model, why=why):
                if model == self._moving:
                    self._moving, self._settled_ns = None, now_ns + self._rules.settled_ns
                    if why or not self._rules.keeps:
                        self._places.pop(model, None)  # where its requests are is seen
                        return [PlacesSet(model, ())]
                return []
            case PoolSampled(models, instances):
                return self._sampled(models, instances, now_ns)

    def _sampled(self, models: Iterable[ModelSample], instances: Iterable[InstanceView], now_ns: int) -> list[Effect]:
        samples, seen = {model.model: model for model in models}, {each.instance: each for each in instances}
        if not seen:
            return []  # a model that is not named may be there all the same
        view = self._view(samples, seen, now_ns)
        return [*self._changes(view, now_ns), *self._idle(view, now_ns)]

    def _changes(self, view: PlacementView, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        resting = self._moving is not None or (self._settled_ns is not None and now_ns < self._settled_ns)
        moving = None
        for change in self._policy.changes(view) if self._policy else ():
            if not change.moves and self._rules.held_ns == 0:
                effects.append(self._settle(change))
            elif moving is None and not resting and self._pays(change, view):
                moving = change
        if moving is None:
            self._wanted = None
            return effects
        if self._wanted != (moving.model, moving.places):
            self._wanted, self._since_ns = (moving.model, moving.places), now_ns
        if now_ns - self._since_ns < self._rules.held_ns:
            return effects
        self._wanted = None
        if not moving.moves:
            self._settled_ns = now_ns + self._rules.settled_ns
            return [*effects, self._settle(moving)]
        self._moving = moving.model
        self._settle(moving)
        return [*effects, MoveModel(moving.model, moving.places[0], moving.source, moving.places, moving.share_ppm)]

    def _settle(self, change: Change) -> PlacesSet:
        self._places[change.model], self.because = change.places, change.because
        return PlacesSet(change.model, change.places)

    def _pays(self, change: Change, view: PlacementView) -> bool:
        if change.gain_ppm is None:
            return True
        model, tokens = view.models[change.model], 0
        for name, instance in view.instances.items():
            if change.source in (None, name) and name != change.places[0]:
                tokens += sum([load.tokens for load in instance.loads if load.model == change.model])
        nbytes = model.weight_bytes + 2 * tokens * change.share_ppm // PPM * model.token_bytes
        costs_ns = nbytes * NS_PER_S / self._hardware.copy_bytes_per_s
        return change.gain_ppm * self._rules.window_ns / PPM > costs_ns

    def _idle(self, view: PlacementView, now_ns: int) -> list[Effect]:
        idle_ns = self._idle_ns
        if idle_ns is None:
            return []
        evicted: list[Effect] = []
        for model, used_ns in self._used_ns.items():
            if now_ns - used_ns < idle_ns or model == self._moving or model in self._evicted:
                continue
            self._evicted.add(model)
            evicted += [Evict(model, name) for name in view.instances]
            if self._places.pop(model, None):
                evicted.append(PlacesSet(model, ()))
        return evicted

    # --- what is seen -------------------------------------------------------------------------------------------------

    def _view(
        self, samples: Mapping[ModelId, ModelSample], instances: Mapping[InstanceId, InstanceView], now_ns: int
    ) -> PlacementView:
        """Averages over the window."""
        requests = dict.fromkeys(samples, 0)
        for instance in instances.values():
            for load in instance.loads:
                if load.model in samples:
                    requests[load.model] += load.requests
        last_ns, last = self._window[-1] if self._window else (now_ns, {})
        traffic = dict[ModelId, _Traffic]()
        for model, each in samples.items():
            present = last[model].present if model in last else 0
            present += requests[model] * (now_ns - last_ns)
            traffic[model] = _Traffic(each.requests, each.prompt_tokens, present)
        self._window.append((now_ns, traffic))
        while len(self._window) > 2 and now_ns - self._window[1][0] >= self._rules.window_ns:
            self._window.popleft()
        self._note(samples, requests, now_ns)
        names = sorted(samples)
        return PlacementView(
            {name: instances[name] for name in sorted(instances)},
            {model: self._model(samples[model], instances, traffic[model].present, now_ns) for model in names},
        )

    def _model(
        self, sample: ModelSample, instances: Mapping[InstanceId, InstanceView], present: int, now_ns: int
    ) -> ModelView:
        since_ns, before = self._window[0][0], self._window[0][1].get(sample.model)
        spent_ns = max(now_ns - since_ns, 1)
        came, tokens = sample.requests, sample.prompt_tokens
        if before:
            came, tokens, present = came - before.requests, tokens - before.prompt_tokens, present - before.present
        prefill_ns = came * sample.job_ns + tokens * sample.million_tokens_ns // PPM
        decoding = present * NS_PER_S / (spent_ns * sample.tbt_ns)
        return ModelView(
            model=sample.model,
            weight_bytes=sample.weight_bytes,
            token_bytes=sample.token_bytes,
            tbt_ns=sample.tbt_ns,
            tokens_per_s=tokens * NS_PER_S / spent_ns + decoding,
            prefill_ppm=prefill_ns * PPM // spent_ns,
            places=self._places_of(sample.model, instances),
        )

    def _places_of(self, model: ModelId, instances: Mapping[InstanceId, InstanceView]) -> tuple[InstanceId, ...]:
        """The places that were set for the model and are up; if there are none, those where it has requests, the most
        first."""
        places = tuple([home for home in self._places.get(model, ()) if home in instances])
        if places:
            return places
        there = [
            (-load.requests, each.instance) for each in instances.values() for load in each.loads if load.model == model
        ]
        return tuple([name for _, name in sorted(there)])

    def _note(self, samples: Mapping[ModelId, ModelSample], requests: Mapping[ModelId, int], now_ns: int) -> None:
        """Which models are in use; those that were removed are forgotten."""
        for model in [model for model in self._used_ns if model not in samples]:
            del self._used_ns[model]
            self._places.pop(model, None)
            self._evicted.discard(model)
            for _, traffic in self._window:
                traffic.pop(model, None)  # one of that name that comes later counts from then
        before = self._window[-2][1] if len(self._window) > 1 else {}
        for model, sample in samples.items():
            asked = model not in before or before[model].requests != sample.requests
            if requests[model] or asked or model not in self._used_ns:
                self._used_ns[model] = now_ns
                self._evicted.discard(model)
