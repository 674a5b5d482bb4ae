"""The model caches of all machines: each has the same models to hold, and is used as the others are.

What is asked of a model's image is asked of all of them, and holds when it holds on each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Protocol

from aegis.core.ids import InstanceId, MachineId, ModelId
from aegis.core.messages import ToInstance
from aegis.core.model import ModelSpec
from aegis.node.image_cache import ImageCache, Wire
from memory.image_cache import Counters, ImageUse, State

_LEAST = (State.ABSENT, State.EVICTING, State.FILLING, State.CACHED)


class Supply(Protocol):
    """The way in which images get to the disks of machines."""

    async def __call__(self, spec: ModelSpec, *, renewed: bool = False) -> None:
        """Every machine has the model's image when this returns; where it was `renewed` here, also those that had a
        damaged one. Raises ModelRefused."""
        ...


class ImageCaches:
    """One `ImageCache` for each machine. What fits into one fits into all: they are of one size. `supply` is waited for
    before a model is added, and when its image was made again."""

    def __init__(self) -> None:
        self.wire: Wire | None = None
        self.supply: Supply = _is_there
        self._caches: dict[MachineId, ImageCache] = {}
        self._instance_hosts: dict[InstanceId, MachineId] = {}
        self._specs: dict[ModelId, ModelSpec] = {}
        self._pinned: set[ModelId] = set()
        self._leaving: dict[ModelId, set[MachineId]] = {}  # dropped, and not forgotten there
        self._counted: Counter[str] = Counter()  # by those that are gone

    def specs(self) -> list[ModelSpec]:
        """All models there are."""
        return list(self._specs.values())

    def open(self, machine: MachineId, cache: ImageCache) -> None:
        """The machine joins, and has all models from now on."""
        cache.wire = _MachineWire(self, machine)
        self._caches[machine] = cache
        for model, spec in self._specs.items():
            cache.add(spec, pinned=model in self._pinned)

    def close(self, machine: MachineId) -> None:
        """The machine is gone, and its instances are lost already."""
        cache = self._caches.pop(machine)
        cache.close()
        self._counted.update(asdict(cache.counters))
        for model in list(self._leaving):
            self.forgotten(model, machine)

    # --- models -------------------------------------------------------------------------------------------------------

    def add(self, spec: ModelSpec, *, pinned: bool) -> bool:
        """False, and nothing is added, where it is to be pinned and the pinned images would not fit."""
        added = [cache for cache in self._caches.values() if cache.add(spec, pinned=pinned)]
        assert len(added) in (0, len(self._caches)), "caches of one size differ in what they hold pinned"
        if not added and self._caches:
            return False
        self._specs[spec.model] = spec
        if pinned:
            self._pinned.add(spec.model)
        return True

    def pin(self, model: ModelId) -> bool:
        """False, and nothing is changed, where the pinned images would not fit. It must not be evicting."""
        pinned = [cache.pin(model) for cache in self._caches.values()]
        if all(pinned):
            self._pinned.add(model)
        return all(pinned)

    def unpin(self, model: ModelId) -> None:
        self._pinned.discard(model)
        for cache in self._caches.values():
            cache.unpin(model)

    def evicting(self, model: ModelId) -> bool:
        """Whether the image is leaving the cache of any machine: it cannot be pinned meanwhile."""
        return any(cache.state(model) is State.EVICTING for cache in self._caches.values())

    def pinned(self, model: ModelId) -> bool:
        return model in self._pinned

    def drop(self, model: ModelId) -> None:
        """`image_forgotten` follows."""
        del self._specs[model]
        self._pinned.discard(model)
        self._leaving[model] = set(self._caches)
        for cache in list(self._caches.values()):
            cache.drop(model)
        if not self._caches:
            self._end_leaving(model)

    def unload(self, model: ModelId) -> None:
        """The image leaves all caches until its next use. It must not be pinned."""
        for cache in self._caches.values():
            cache.unload(model)

    def use(self, model: ModelId, now_ns: int) -> None:
        """A request for the model came."""
        for cache in self._caches.values():
            cache.use(model, now_ns)

    def state(self, model: ModelId) -> State:
        """The state on the machine on which it is the least advanced. A model that was dropped is on none."""
        if model not in self._specs:
            return State.ABSENT
        return min((cache.state(model) for cache in self._caches.values()), key=_LEAST.index, default=State.ABSENT)

    # --- instances ----------------------------------------------------------------------------------------------------

    def join(self, instance: InstanceId, machine: MachineId) -> None:
        self._instance_hosts[instance] = machine
        self._caches[machine].join(instance)

    def lost(self, instance: InstanceId) -> None:
        self._caches[self._instance_hosts.pop(instance)].lost(instance)

    def evicted(self, model: ModelId, instance: InstanceId) -> None:
        self._caches[self._instance_hosts[instance]].evicted(model, instance)

    def forgotten(self, model: ModelId, machine: MachineId) -> None:
        """No instance on that machine loads the image of a dropped model any more."""
        leaving = self._leaving[model]
        leaving.discard(machine)
        if not leaving:
            self._end_leaving(model)

    # --- reports ------------------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """The counters of all machines together, from any thread."""
        total = Counter(self._counted)
        for cache in list(self._caches.values()):
            total.update(asdict(cache.counters))
        return Counters(**total)

    def accounts(self) -> dict[str, int]:
        """Extents of all machines by what they hold, from any thread."""
        total = Counter[str]()
        for cache in list(self._caches.values()):
            total.update(cache.accounts())
        return dict(total)

    def images(self) -> dict[ModelId, ImageUse]:
        """The images of all machines together."""
        found: dict[ModelId, ImageUse] = {}
        for cache in self._caches.values():
            for model, use in cache.images().items():
                known = found.get(model, use)
                found[model] = min(use, known, key=lambda each: _LEAST.index(each.state))
        return found

    # ------------------------------------------------------------------------------------------------------------------

    def _end_leaving(self, model: ModelId) -> None:
        del self._leaving[model]
        assert self.wire is not None
        self.wire.image_forgotten(model)


async def _is_there(spec: ModelSpec, *, renewed: bool = False) -> None:
    """The supply of a market with one machine: every image is there."""


class _MachineWire:
    """The messages of one of the caches."""

    def __init__(self, caches: ImageCaches, machine: MachineId) -> None:
        self._caches = caches
        self._machine = machine

    def post(self, instance: InstanceId, message: ToInstance) -> None:
        assert self._caches.wire is not None
        self._caches.wire.post(instance, message)

    def image_forgotten(self, model: ModelId) -> None:
        self._caches.forgotten(model, self._machine)

    def image_damaged(self, model: ModelId, reason: str) -> None:
        assert self._caches.wire is not None
        self._caches.wire.image_damaged(model, reason)
