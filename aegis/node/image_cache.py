"""A machine's model cache at work: which weight images lie in its host memory, filled from disk beside serving.

`memory.image_cache` decides; here its decisions are done. All methods are called on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol

from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import ToInstance
from aegis.core.model import IMAGE_EXTENT_BYTES, ModelSpec
from aegis.node.image_filler import Filled
from aegis.process.tasks import watched
from memory.image_cache import (
    AbandonFill,
    CacheEffect,
    Counters,
    Fill,
    Forgotten,
    ImageUse,
    ModelCache,
    NotifyInstance,
    State,
)
from memory.pages import NoPages, Runs


class Wire(Protocol):
    """The node, as the cache needs it."""

    def post(self, instance: InstanceId, message: ToInstance) -> None: ...

    def image_forgotten(self, model: ModelId) -> None:
        """No instance loads from the image of a dropped model any more."""
        ...

    def image_damaged(self, model: ModelId, reason: str) -> None:
        """The image on disk is not what it should be."""
        ...


class Filler(Protocol):
    """The part that has the memory and reads the disk: `ImageFiller`, or one on another machine."""

    @property
    def extents(self) -> int:
        """The number of extents of each rank's region."""
        ...

    def fill(self, spec: ModelSpec, runs: Runs) -> Awaitable[Filled]: ...

    def abandon(self, model: ModelId) -> None: ...


class ImageCache:
    """The books of one machine's images, and what they ask of its `filler`."""

    def __init__(self, filler: Filler, *, check_laws: bool = False) -> None:
        self.wire: Wire | None = None
        self._filler = filler
        self._check_laws = check_laws
        self._books = ModelCache(filler.extents)
        self._specs: dict[ModelId, ModelSpec] = {}
        self._filling: set[asyncio.Task[None]] = set()

    @property
    def counters(self) -> Counters:
        return self._books.counters

    def accounts(self) -> dict[str, int]:
        """Extents by what they hold."""
        return self._books.accounts()

    def images(self) -> dict[ModelId, ImageUse]:
        return self._books.images()

    def state(self, model: ModelId) -> State:
        return self._books.state(model)

    def pinned(self, model: ModelId) -> bool:
        return self._books.pinned(model)

    def add(self, spec: ModelSpec, *, pinned: bool) -> bool:
        """False, and nothing is added, where it is to be pinned and the pinned images would not fit."""
        effects = self._books.add(spec.model, -(-spec.manifest.image_bytes // IMAGE_EXTENT_BYTES), pinned=pinned)
        if isinstance(effects, NoPages):
            return False
        self._specs[spec.model] = spec
        self._perform(effects)
        return True

    def pin(self, model: ModelId) -> bool:
        """False, and nothing is changed, where the pinned images would not fit. It must not be evicting."""
        effects = self._books.pin(model)
        if isinstance(effects, NoPages):
            return False
        self._perform(effects)
        return True

    def unpin(self, model: ModelId) -> None:
        self._books.unpin(model)

    def drop(self, model: ModelId) -> None:
        """`image_forgotten` follows."""
        self._perform(self._books.drop(model))

    def unload(self, model: ModelId) -> None:
        """The image leaves the cache until its next use. It must not be pinned."""
        self._perform(self._books.unload(model))

    def use(self, model: ModelId, now_ns: int) -> None:
        """A request for the model came."""
        self._perform(self._books.use(model, now_ns))

    def join(self, instance: InstanceId) -> None:
        self._perform(self._books.join(instance))

    def lost(self, instance: InstanceId) -> None:
        self._perform(self._books.lost(instance))

    def evicted(self, model: ModelId, instance: InstanceId) -> None:
        self._perform(self._books.evicted(model, instance))

    def close(self) -> None:
        """Fills under way need not go on."""
        for task in self._filling:
            task.cancel()

    # ------------------------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[CacheEffect]) -> None:
        assert self.wire is not None
        for effect in effects:
            match effect:
                case Fill(model, extents):
                    task = watched(self._end(model, self._filler.fill(self._specs[model], extents)))
                    self._filling.add(task)
                    task.add_done_callback(self._filling.discard)
                case AbandonFill(model):
                    self._filler.abandon(model)
                case NotifyInstance(instance, message):
                    self.wire.post(instance, message)
                case Forgotten(model):
                    del self._specs[model]
                    self.wire.image_forgotten(model)
        if self._check_laws:
            self._books.check()

    async def _end(self, model: ModelId, filling: Awaitable[Filled]) -> None:
        filled = await filling
        self._perform(self._books.filled(model) if filled.whole else self._books.unfillable(model))
        if filled.damage and self.wire:
            self.wire.image_damaged(model, filled.damage)
