"""The models as the node keeps them: bound, cached in host memory, removed and added anew.

Where what node and proxy say may come in any order, an instance is up once it has bound all models that are, and a
model is once all instances that are up have bound it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import AddModel, DropModel, ToInstance, UnloadModel
from aegis.core.model import ModelSpec
from aegis.core.role import Role
from aegis.sim.faults.fake_models import PAGE
from aegis.sim.faults.state import FaultWorldState
from memory.awaited_answers import AwaitedAnswers
from memory.budget import Budget
from memory.image_cache import AbandonFill, CacheEffect, Fill, Forgotten, ModelCache, NotifyInstance
from proxy.routing.events import Event, InstanceUp, ModelAway, ModelRemoved, ModelUp

_RENEWAL_NS = 20_000_000  # that it takes to make an image again
_HASTE = 100  # of the cache's clock: only uses a second apart show it that a model is in demand


class Wire(Protocol):
    """The world, as its models need it."""

    def up(self) -> list[InstanceId]: ...

    def post(self, instance: InstanceId, message: ToInstance) -> None: ...

    def inform(self, event: Event, after: Callable[[], None] = ...) -> None: ...


class ModelCatalogue:
    """`specs` are those that are served; `readded` counts those that came back."""

    def __init__(self, wire: Wire, state: FaultWorldState, budget: Budget, *, extents: int, parted: bool) -> None:
        self.specs: dict[ModelId, ModelSpec] = {}
        self.readded = 0
        self.cache = ModelCache(extents)
        self._cached = extents > 0
        self._wire = wire
        self._state = state
        self._budget = budget
        self._parted = parted
        self._bound: dict[InstanceId, set[ModelId]] = {}
        self._told_up: set[InstanceId] = set()
        self._told: set[ModelId] = set()  # that the model is served
        self._removing: dict[ModelId, tuple[ModelSpec, set[InstanceId]]] = {}  # instances that have not answered yet
        self._abandoned: set[ModelId] = set()
        self._renewing: set[ModelId] = set()  # whose image is being made again
        self._unloading = AwaitedAnswers[ModelId]()

    # --- models come and go -------------------------------------------------------------------------------------------

    def register(self, spec: ModelSpec) -> None:
        self.specs[spec.model] = spec
        if self._cached:
            added = self.cache.add(spec.model, -(-spec.manifest.image_bytes // PAGE))
            assert isinstance(added, list)
            self._keep(added)
        if not self._parted:
            self._tell_model(spec)
        for instance in self._wire.up():
            self._wire.post(instance, AddModel(spec))
        self._settle()

    def remove(self) -> None:
        """Removes the model in the middle of its work; it comes back once no instance holds it any more. None that
        has adapters."""
        adapters = [*self.specs.values(), *[spec for spec, _ in self._removing.values()]]
        alone = sorted(self.specs.keys() - {spec.base for spec in adapters})
        if not alone:
            return
        model = alone[self._state.draw.below(len(alone))]
        up = self._wire.up()
        self._removing[model] = (self.specs.pop(model), set(up))
        self._told.discard(model)
        self._unloading.forget(model)
        self._wire.inform(ModelRemoved(model))
        if self._cached:
            self._keep(self.cache.drop(model))
        for instance in up:
            self._wire.post(instance, DropModel(model))
        self._let_go()

    def unload(self, number: int) -> None:
        """Its weights leave all memory; requests of it go on, and others come."""
        if not self.specs:
            return
        model = sorted(self.specs)[number % len(self.specs)]
        self._state.note(f"{model} is unloaded")
        for instance in self._wire.up():
            self._wire.post(instance, UnloadModel(model))
        if self._unloading.begin(model, self._wire.up()):
            self._uncache(model)

    def use(self, model: ModelId) -> None:
        self._unloading.forget(model)
        if self._cached:
            self._keep(self.cache.use(model, self._state.now_ns * _HASTE))

    def check_end(self) -> None:
        """Checks that everything that was to leave has left."""
        self.cache.check()
        assert not self.cache.accounts()["evicting"] and not self._removing, f"{sorted(self._removing)} never left"
        assert not self._unloading, "somebody was never done with unloading a model"

    # --- instances come and go, and what they say ---------------------------------------------------------------------

    def join(self, instance: InstanceId) -> None:
        self._bound[instance] = set()
        for spec in self.specs.values():
            self._wire.post(instance, AddModel(spec))
        self._keep(self.cache.join(instance))
        if not self._parted:
            self._tell_up(instance)
        self._settle()

    def lost(self, instance: InstanceId) -> None:
        for model in self._unloading.lost(instance):
            self._uncache(model)
        del self._bound[instance]
        self._told_up.discard(instance)
        self._keep(self.cache.lost(instance))
        for _, waiting in self._removing.values():
            waiting.discard(instance)
        self._let_go()
        self._settle()

    def added(self, instance: InstanceId, model: ModelId) -> None:
        self._bound[instance].add(model)
        self._settle()

    def unreadable(self, model: ModelId) -> None:
        """Its requests wait until the image was made again."""
        if model in self.specs and model not in self._renewing:
            self._renewing.add(model)
            self._wire.inform(ModelAway(model))
            self._state.after(_RENEWAL_NS, lambda: self._renewed(model))

    def dropped(self, instance: InstanceId, model: ModelId) -> None:
        self._bound[instance].discard(model)
        self._removing[model][1].discard(instance)
        self._let_go()

    def unloaded(self, instance: InstanceId, model: ModelId) -> None:
        if self._unloading.answered(model, instance):
            self._uncache(model)

    def evicted(self, instance: InstanceId, model: ModelId) -> None:
        self._keep(self.cache.evicted(model, instance))

    # ------------------------------------------------------------------------------------------------------------------

    def _uncache(self, model: ModelId) -> None:
        if self._cached:
            self._keep(self.cache.unload(model))

    def _renewed(self, model: ModelId) -> None:
        self._renewing.discard(model)
        if model in self._told:
            self._tell_model(self.specs[model])

    def _let_go(self) -> None:
        """Models that no instance holds any more are added anew."""
        for model, (spec, waiting) in list(self._removing.items()):
            if not waiting and model not in self.cache:
                del self._removing[model]
                self.readded += 1
                self.register(spec)

    def _settle(self) -> None:
        if not self._parted:
            return
        for instance, bound in sorted(self._bound.items()):
            if instance not in self._told_up and bound >= self._told:
                self._tell_up(instance)
        for model, spec in self.specs.items():
            if model not in self._told and all(model in self._bound[instance] for instance in self._told_up):
                self._tell_model(spec)

    def _tell_up(self, instance: InstanceId) -> None:
        self._told_up.add(instance)
        self._wire.inform(InstanceUp(instance, Role(instance.partition("-")[0])))

    def _tell_model(self, spec: ModelSpec) -> None:
        self._told.add(spec.model)
        held = self._budget.device_tokens(spec.manifest.image_bytes, spec.manifest.kv)
        self._wire.inform(ModelUp(spec, held))

    def _keep(self, effects: list[CacheEffect]) -> None:
        """Performs what the model cache decides."""
        self.cache.check()
        for effect in effects:
            match effect:
                case NotifyInstance(instance, message):
                    self._wire.post(instance, message)
                case Fill():
                    self._fill(effect)
                case AbandonFill(model):
                    self._abandoned.add(model)
                case Forgotten():
                    self._state.after(0, self._let_go)

    def _fill(self, fill: Fill) -> None:
        draw, images = self._state.draw, self._state.images
        extents = [extent for run in fill.extents for extent in range(run.start, run.stop)]
        for extent in extents:
            images.pop(extent, None)  # written to from now on
        fails = draw.uniform() < self._state.unreadable_share

        def end() -> None:
            if fails or fill.model in self._abandoned:
                self._abandoned.discard(fill.model)
                self._keep(self.cache.unfillable(fill.model))
                return
            images.update(dict.fromkeys(extents, fill.model))
            self._keep(self.cache.filled(fill.model))

        self._state.after(500_000 * len(extents) + draw.below(2_000_000), end)
