"""The memory accounts of a simulated node: who of its parts answers what an instance says.

Pages are granted by the arbiter of the instance's device, host slabs are leased and KV is kept by `HostKv`, and what
concerns models and their images is for a `ModelListener`. Sans-I/O, as its parts: methods return what is to be done.
Both simulated worlds have their memory here. What a message costs, and what is in the memory, is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, cast, get_args

from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import (
    CarryBegan,
    CarryOver,
    FromInstance,
    GaveBack,
    ImageEvicted,
    ImageUnreadable,
    LoadOver,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    ModelUnloaded,
    NeedLinks,
    NeedPages,
    Telemetry,
    ToInstance,
)
from aegis.core.model import ModelSpec
from memory.host_kv import ForHost, HostKv
from memory.page_arbiter import ArbiterEffect, PageArbiter, Settled, WipeLost
from memory.peers.links import ForLinks, PeerLinks

FOR_NODE: Final = frozenset(
    {
        NeedPages,
        GaveBack,
        Telemetry,
        ModelAdded,
        ModelFailed,
        ModelDropped,
        ModelUnloaded,
        ImageEvicted,
        ImageUnreadable,
        *get_args(ForHost),
        *get_args(ForLinks),
    }
)
"""Messages of instances that the node answers. The rest is for the proxy."""

NodeEffect = tuple[InstanceId, ToInstance] | WipeLost | Settled


class ModelListener(Protocol):
    """What instances say about models and their images."""

    def added(self, instance: InstanceId, model: ModelId) -> None: ...

    def dropped(self, instance: InstanceId, model: ModelId) -> None: ...

    def unloaded(self, instance: InstanceId, model: ModelId) -> None: ...

    def evicted(self, instance: InstanceId, model: ModelId) -> None: ...

    def unreadable(self, model: ModelId) -> None: ...


class NodeMemory:
    """`host_slabs` of `slab_bytes` for KV; `spec_of` knows the models whose KV may be kept. Without a listener nobody
    has to know what becomes of models."""

    __slots__ = ("_arbiters", "_devices", "_links", "host", "models")

    def __init__(
        self,
        host_slabs: int,
        slab_bytes: int,
        spec_of: Callable[[ModelId], ModelSpec | None],
        models: ModelListener | None = None,
    ) -> None:
        self.host = HostKv(host_slabs, slab_bytes, spec_of)
        self.models = models
        self._arbiters: dict[InstanceId, PageArbiter] = {}
        self._devices: dict[PageArbiter, None] = {}  # in order of their first instances; they outlive those
        self._links: dict[InstanceId, PeerLinks] = {}  # of its machine

    def join(self, instance: InstanceId, arbiter: PageArbiter, links: PeerLinks | None = None) -> None:
        """The instance is on the arbiter's device. With `links` devices carry for each other's loads."""
        self._arbiters[instance] = arbiter
        self._devices[arbiter] = None
        if links:
            self._links[instance] = links
            links.join(instance, f"{list(self._devices).index(arbiter):06}")
        self.host.join(instance)
        arbiter.join(instance)

    def lost(self, instance: InstanceId, words: tuple[int, ...]) -> list[NodeEffect]:
        """All memory that it had belongs to others; `words` were its streams'."""
        if instance in self._links:
            self._links.pop(instance).lost(instance)
        return [*self.host.lost(instance, words), *self._arbiters.pop(instance).lost(instance)]

    def hear(self, instance: InstanceId, message: FromInstance, now_ns: int) -> list[NodeEffect]:
        """`message` must be one of `FOR_NODE`."""
        match message:
            case NeedPages():
                return _effects(self._arbiters[instance].ask(instance, message))
            case GaveBack():
                return _effects(self._arbiters[instance].gave_back(instance, message))
            case Telemetry(queued=queued, running=running):
                self.seen(instance, queued + running, now_ns)
                return []
            case ModelAdded() | ModelFailed() | ModelDropped() | ModelUnloaded() | ImageEvicted() | ImageUnreadable():
                self._tell_models(instance, message)
                return []
            case NeedLinks() | LoadOver() | CarryBegan() | CarryOver():
                links = self._links.get(instance)
                return [*links.on_message(instance, message)] if links else []
            case _:
                return [*self.host.on_message(instance, cast(ForHost, message))]

    def seen(self, instance: InstanceId, requests: int, now_ns: int) -> None:
        """So many are queued or running there."""
        self._arbiters[instance].seen(instance, busy=requests > 0, now_ns=now_ns)

    def tick(self, now_ns: int) -> list[NodeEffect]:
        """Time has passed."""
        return [effect for arbiter in self._devices for effect in arbiter.tick(now_ns)]

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        self.host.check()
        for arbiter in self._devices:
            arbiter.check()
        for links in self._links.values():
            links.check()

    def _tell_models(self, instance: InstanceId, message: FromInstance) -> None:
        if self.models is None:
            return
        match message:
            case ModelAdded(model):
                self.models.added(instance, model)
            case ModelDropped(model):
                self.models.dropped(instance, model)
            case ModelUnloaded(model):
                self.models.unloaded(instance, model)
            case ImageEvicted(model):
                self.models.evicted(instance, model)
            case ImageUnreadable(model):
                self.models.unreadable(model)


def _effects(effects: list[ArbiterEffect]) -> list[NodeEffect]:
    return [*effects]
