"""The node's model cache, counted: the weight images in its extents, and those on their way in or out.

One region of host memory, cut in extents, holds as many images as fit; every instance has all of it mapped. An image is
absent, filling, cached or evicting. It leaves in two steps, because an instance may be loading from it: all instances
are told, and its extents are free once each has answered or was lost.

An image that is wanted and absent takes free extents; without enough of them it evicts images that are not pinned,
least recently used first. If even that does not suffice, no image leaves and the wanted one is refused: its model is
loaded from disk. A pinned one that is refused, because others are being filled, is wanted again as soon as more can
leave. An image that is not pinned never evicts one that was used since its own last use: of two models, the one that is
used twice while the other is not used at all is the more frequent (O'Neil et al., The LRU-K page replacement algorithm,
SIGMOD 1993, with K = 2). So a model that is called once a day drives nobody out, and models that take turns and do not
fit keep a part of them cached, where plain LRU would evict each shortly before it is needed. Uses in quick succession
count as one.

Laws: (I1) an image that is not absent holds exactly its extents, an absent one none, and no extent has two holders;
(I2) extents promised to images that wait for evictions are free or being evicted; (I3) the first waiting image wants
more than is free; (I4) an image on its way out waits for an instance that is up; (I5) of pinned images only a dropped
one leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, ModelId, PageRun
from aegis.core.messages import EvictImage, ImageCached
from memory.pages import NoPages, PagePool, Runs

ONE_USE_NS: Final = 1_000_000_000
"""A use that follows another one within this time says nothing of the demand for the model, because both may be one
client's."""

_NEVER_NS: Final = -1


class State(StrEnum):
    ABSENT = "absent"
    FILLING = "filling"
    CACHED = "cached"
    EVICTING = "evicting"


@dataclass(frozen=True, slots=True)
class Fill:
    """Copy the image from disk into these extents. Answered once, by `filled` or `unfillable`."""

    model: ModelId
    extents: Runs


@dataclass(frozen=True, slots=True)
class AbandonFill:
    """The rest of this fill need not be done. It is answered all the same."""

    model: ModelId


@dataclass(frozen=True, slots=True)
class NotifyInstance:
    instance: InstanceId
    message: ImageCached | EvictImage


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Nothing is left of an image that was dropped."""

    model: ModelId


CacheEffect = Fill | AbandonFill | NotifyInstance | Forgotten


@dataclass(slots=True)
class Counters:
    """Counts since the start. A use is a hit if the image was cached; `refused` are misses that found no room."""

    hits: int = 0
    misses: int = 0
    fills: int = 0
    failed_fills: int = 0
    evictions: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class ImageUse:
    """One model's image; absent ones hold nothing of their `extents`."""

    state: State
    extents: int
    pinned: bool


@dataclass(slots=True)
class _Image:
    count: int  # extents
    pinned: bool
    state: State = State.ABSENT
    extents: Runs = ()
    used_ns: int = _NEVER_NS
    used_before_ns: int = _NEVER_NS
    dropped: bool = False
    unloaded: bool = False  # while filling: it leaves as soon as it is there
    failed: bool = False  # its last fill has: it is not wanted again before its next use
    answers: set[InstanceId] = field(default_factory=set)  # still to come, while evicting


class ModelCache:
    """The accounts of `capacity` extents."""

    def __init__(self, capacity: int) -> None:
        self.counters = Counters()
        self._pool = PagePool([PageRun(0, capacity)] if capacity else [])
        self._images: dict[ModelId, _Image] = {}
        self._waiting: list[ModelId] = []  # for extents, in order of asking
        self._up: set[InstanceId] = set()
        self._out: list[CacheEffect] = []

    def __contains__(self, model: ModelId) -> bool:
        return model in self._images

    def state(self, model: ModelId) -> State:
        return self._images[model].state

    def pinned(self, model: ModelId) -> bool:
        return self._images[model].pinned

    def accounts(self) -> dict[str, int]:
        """The number of extents by what they hold now. From any thread."""
        extents = {"free": self._pool.free, "filling": 0, "cached": 0, "evicting": 0}
        for image in list(self._images.values()):
            state = image.state
            if state is not State.ABSENT:
                extents[state] += image.count
        return extents

    def images(self) -> dict[ModelId, ImageUse]:
        return {model: ImageUse(image.state, image.count, image.pinned) for model, image in self._images.items()}

    # --- models -------------------------------------------------------------------------------------------------------

    def add(self, model: ModelId, count: int, *, pinned: bool = False) -> list[CacheEffect] | NoPages:
        """Adds an image of `count` extents. It is filled at once if there is room; a pinned one makes room. Refused,
        and not added, if the pinned images alone would be more than the cache holds."""
        assert model not in self._images
        pins = sum(image.count for image in self._images.values() if image.pinned and not image.dropped)
        if pinned and pins + count > self._pool.capacity:
            return NoPages(count, self._pool.capacity - pins)
        image = self._images[model] = _Image(count, pinned)
        if pinned or count <= self._unpromised():
            self._want(model, image)
        return self._drain()

    def pin(self, model: ModelId) -> list[CacheEffect] | NoPages:
        """From now on the image stays; if it is absent, it is filled. Refused if the pinned images alone would be more
        than the cache holds. It must not be evicting."""
        image = self._images[model]
        assert image.state is not State.EVICTING
        pins = sum(other.count for other in self._images.values() if other.pinned and not other.dropped)
        if image.pinned:
            return []
        if pins + image.count > self._pool.capacity:
            return NoPages(image.count, self._pool.capacity - pins)
        image.pinned, image.unloaded, image.failed = True, False, False
        if image.state is State.ABSENT and model not in self._waiting:
            self._want(model, image)
        return self._drain()

    def unpin(self, model: ModelId) -> None:
        """The image may leave the cache like any other."""
        self._images[model].pinned = False

    def drop(self, model: ModelId) -> list[CacheEffect]:
        """The model is removed; `Forgotten` follows, now or when every instance has let go of its image."""
        image = self._images[model]
        image.dropped = True
        if model in self._waiting:
            self._waiting.remove(model)
        if image.state is State.CACHED:
            self._evict(model, image)
        elif image.state is State.FILLING:
            self._out.append(AbandonFill(model))
        elif image.state is State.ABSENT:
            self._forget(model)
        return self._serve()

    def unload(self, model: ModelId) -> list[CacheEffect]:
        """The image leaves, and is filled again with its next use. It must not be pinned."""
        image = self._images[model]
        assert not image.pinned
        if model in self._waiting:
            self._waiting.remove(model)
        if image.state is State.CACHED:
            self._evict(model, image)
        image.unloaded = image.state is State.FILLING
        return self._serve()

    def use(self, model: ModelId, now_ns: int) -> list[CacheEffect]:
        """A request for the model came."""
        image = self._images[model]
        image.unloaded = image.failed = False
        if image.state is State.CACHED:
            self.counters.hits += 1
        else:
            self.counters.misses += 1
        if now_ns >= image.used_ns + ONE_USE_NS or image.used_ns == _NEVER_NS:
            image.used_before_ns, image.used_ns = image.used_ns, now_ns
        if image.state is State.ABSENT and model not in self._waiting:
            self.counters.refused += not self._want(model, image)
        return self._drain()

    def filled(self, model: ModelId) -> list[CacheEffect]:
        image = self._images[model]
        if image.dropped or image.unloaded:
            self._release(model, image)  # no instance was told of it
            return self._serve()
        image.state = State.CACHED
        self.counters.fills += 1
        self._out += [NotifyInstance(instance, ImageCached(model, image.extents)) for instance in sorted(self._up)]
        return self._serve()

    def unfillable(self, model: ModelId) -> list[CacheEffect]:
        """The image could not be read, or its fill was abandoned."""
        image = self._images[model]
        self.counters.failed_fills += not image.dropped
        image.failed = True
        self._release(model, image)
        return self._serve()

    # --- instances ----------------------------------------------------------------------------------------------------

    def join(self, instance: InstanceId) -> list[CacheEffect]:
        """A new process: it is told of all cached images."""
        assert instance not in self._up
        self._up.add(instance)
        cached = [(model, image.extents) for model, image in self._images.items() if image.state is State.CACHED]
        return [NotifyInstance(instance, ImageCached(model, extents)) for model, extents in cached]

    def lost(self, instance: InstanceId) -> list[CacheEffect]:
        """The instance's process is gone, and with it every load of an image."""
        self._up.discard(instance)
        for model in [model for model, image in self._images.items() if instance in image.answers]:
            self._answered(model, instance)
        return self._serve()

    def evicted(self, model: ModelId, instance: InstanceId) -> list[CacheEffect]:
        """The instance does not load from the image any more."""
        self._answered(model, instance)
        return self._serve()

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        self._pool.check()
        for model, image in self._images.items():
            if self._pool.runs_of(model) != image.extents or bool(image.extents) != (image.state is not State.ABSENT):
                raise LawBroken(f"I1: {model}, {image.state}, lists {image.extents}, holds {self._pool.runs_of(model)}")
            if (image.state is State.EVICTING) != bool(image.answers) or not image.answers <= self._up:
                raise LawBroken(f"I4: {model}, {image.state}, waits for {sorted(image.answers)}")
            if image.pinned and image.state is State.EVICTING and not image.dropped:
                raise LawBroken(f"I5: {model} is pinned and evicted")
        if sum(image.count for image in self._images.values() if image.extents) != self._pool.used:
            raise LawBroken(f"I1: {self._pool.used} extents are used, not by images")
        if self._unpromised() < 0:
            raise LawBroken(f"I2: {-self._unpromised()} extents are promised and not to be had")
        if self._waiting and self._images[self._waiting[0]].count <= self._pool.free:
            raise LawBroken(f"I3: {self._waiting[0]} waits though {self._pool.free} extents are free")

    # ------------------------------------------------------------------------------------------------------------------

    def _unpromised(self) -> int:
        """Extents that are free, or will be, and that no image waits for."""
        leaving = sum(image.count for image in self._images.values() if image.state is State.EVICTING)
        return self._pool.free + leaving - sum(self._images[model].count for model in self._waiting)

    def _want(self, model: ModelId, image: _Image) -> bool:
        """Whether the image is on its way, or waits for those that leave."""
        victims = self._victims(image, image.count - self._unpromised())
        if victims is None:
            return False
        self._waiting.append(model)
        for victim in victims:
            self.counters.evictions += 1
            self._evict(victim, self._images[victim])
        self._serve_waiting()
        return True

    def _victims(self, wanted: _Image, short: int) -> list[ModelId] | None:
        """The models whose extents make up for the missing ones; None if none suffice."""
        idle = [
            (image.used_ns, model)
            for model, image in self._images.items()
            if image.state is State.CACHED and not image.pinned
            if wanted.pinned or image.used_ns <= wanted.used_before_ns
        ]
        victims: list[ModelId] = []
        for _, model in sorted(idle):
            if short <= 0:
                break
            victims.append(model)
            short -= self._images[model].count
        return victims if short <= 0 else None

    def _evict(self, model: ModelId, image: _Image) -> None:
        image.state = State.EVICTING
        image.answers = set(self._up)
        self._out += [NotifyInstance(instance, EvictImage(model)) for instance in sorted(self._up)]
        if not image.answers:
            self._release(model, image)

    def _answered(self, model: ModelId, instance: InstanceId) -> None:
        image = self._images[model]
        image.answers.remove(instance)
        if not image.answers:
            self._release(model, image)

    def _release(self, model: ModelId, image: _Image) -> None:
        self._pool.give(model, image.extents)
        image.state, image.extents, image.unloaded = State.ABSENT, (), False
        if image.dropped:
            self._forget(model)

    def _forget(self, model: ModelId) -> None:
        del self._images[model]
        self._out.append(Forgotten(model))

    def _serve_waiting(self) -> None:
        """Strictly in order of asking: small images would starve a large one."""
        while self._waiting and self._images[self._waiting[0]].count <= self._pool.free:
            model = self._waiting.pop(0)
            image = self._images[model]
            extents = self._pool.take(model, image.count)
            assert not isinstance(extents, NoPages)
            image.state, image.extents = State.FILLING, extents
            self._out.append(Fill(model, extents))

    def _serve(self) -> list[CacheEffect]:
        """More is free, or may leave: those that wait come first, then pinned images that were refused."""
        self._serve_waiting()
        for model, image in self._images.items():
            if image.pinned and image.state is State.ABSENT and not image.failed and model not in self._waiting:
                self._want(model, image)
        return self._drain()

    def _drain(self) -> list[CacheEffect]:
        out, self._out = self._out, []
        return out
