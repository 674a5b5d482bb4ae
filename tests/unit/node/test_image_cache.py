"""Fills of the model cache from real files into the region that instances map."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

from aegis.core.effects import Bind, Send, StreamName
from aegis.core.events import Progress
from aegis.core.ids import InstanceId, ModelId, PageRun
from aegis.core.messages import EvictImage, FromInstance, GrantPages, ImageCached, ImageEvicted, ToInstance
from aegis.core.model import IMAGE_EXTENT_BYTES, IMAGE_PIECE_BYTES, ModelSpec
from aegis.core.request import EventHandle
from aegis.device import image_file
from aegis.device.cached_images import CachedImages
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import CpuPool
from aegis.device.host_memory import MappedFile, SharedMemory
from aegis.device.memory_executor import MemoryExecutor
from aegis.device.shared_events import SharedWords
from aegis.device.stage_buffer import StageBuffer
from aegis.node.image_cache import ImageCache
from aegis.node.image_filler import ImageFiller
from memory.budget import Budget
from memory.image_cache import State
from memory.ledger import Ledger
from tests import weight_images

EXTENT = IMAGE_EXTENT_BYTES
A = InstanceId("decode-0")
WAIT_S = 20


@dataclass
class Wire:
    """An instance that answers at once, and what the others hear."""

    cache: ImageCache
    path: str  # of the region
    answering: bool = True
    told: list[ToInstance] = field(default_factory=list)
    forgotten: list[ModelId] = field(default_factory=list)
    damage: dict[ModelId, str] = field(default_factory=dict)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def post(self, instance: InstanceId, message: ToInstance) -> None:
        assert instance == A
        self.told.append(message)
        self.heard.set()
        if isinstance(message, EvictImage) and self.answering:
            asyncio.get_running_loop().call_soon(self.cache.evicted, message.model, A)

    def image_forgotten(self, model: ModelId) -> None:
        self.forgotten.append(model)
        self.heard.set()

    def image_damaged(self, model: ModelId, reason: str) -> None:
        self.damage[model] = reason
        self.heard.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self.heard.wait()
                self.heard.clear()

    def extents(self, model: ModelId) -> tuple[PageRun, ...]:
        return next(m.extents for m in reversed(self.told) if isinstance(m, ImageCached) and m.model == model)

    def cached(self, spec: ModelSpec) -> bool:
        """Whether the image's bytes lie where the instances were last told."""
        region = MappedFile(self.path, writable=False, populate=False)
        parts = [
            ctypes.string_at(region.base + start * EXTENT, (stop - start) * EXTENT)
            for start, stop in self.extents(spec.model)
        ]
        region.close()
        nbytes = spec.manifest.image_bytes
        return b"".join(parts)[:nbytes] == weight_images.content(spec.model, nbytes)


def serving(extents: int, script: Callable[[ImageCache, Wire], Awaitable[None]]) -> None:
    async def main() -> None:
        filler = ImageFiller(extents * EXTENT)
        cache = ImageCache(filler, check_laws=True)
        wire = cache.wire = Wire(cache, filler.paths[0])
        cache.join(A)
        await script(cache, wire)
        cache.close()
        filler.close()

    asyncio.run(main())


def test_each_rank_has_its_own_image_in_the_same_extents(tmp_path: Path) -> None:
    nbytes = IMAGE_PIECE_BYTES + 100
    first, second = (weight_images.write(tmp_path, name, nbytes) for name in ("image", "image-1"))
    sums = first.manifest.checksums + second.manifest.checksums
    spec = structs.replace(first, manifest=structs.replace(first.manifest, ranks=2, checksums=sums))

    async def main() -> None:
        filler = ImageFiller(6 * EXTENT, ranks=2)
        cache = ImageCache(filler, check_laws=True)
        wire = cache.wire = Wire(cache, filler.paths[0])
        cache.join(A)
        assert cache.accounts()["free"] == 3
        assert cache.add(spec, pinned=False)
        await wire.until(lambda: wire.told)
        for path, name in zip(filler.paths, ("image", "image-1"), strict=True):
            assert Path(path).read_bytes()[:nbytes] == weight_images.content(name, nbytes)
        cache.close()
        filler.close()

    asyncio.run(main())


@pytest.fixture
def specs(tmp_path: Path) -> list[ModelSpec]:
    """Of one, three and four extents; the second and third are two pieces."""
    sizes = {"one": 5000, "three": IMAGE_PIECE_BYTES + 100, "four": 2 * IMAGE_PIECE_BYTES}
    return [weight_images.write(tmp_path, name, nbytes) for name, nbytes in sizes.items()]


def test_images_are_filled_side_by_side_as_long_as_there_is_room(specs: list[ModelSpec]) -> None:
    async def script(cache: ImageCache, wire: Wire) -> None:
        assert all(cache.add(spec, pinned=False) for spec in specs)
        await wire.until(lambda: len(wire.told) == 2)
        assert wire.cached(specs[0]) and wire.cached(specs[1])
        assert cache.state(specs[2].model) is State.ABSENT
        assert cache.accounts() == {"free": 3, "filling": 0, "cached": 4, "evicting": 0}

    serving(7, script)


def test_a_miss_evicts_and_lands_in_the_scattered_extents_that_came_free(tmp_path: Path) -> None:
    small = [weight_images.write(tmp_path, f"small-{at}", 4000 + at) for at in range(5)]
    large = weight_images.write(tmp_path, "large", 2 * EXTENT + 7)

    async def script(cache: ImageCache, wire: Wire) -> None:
        for spec in small:
            cache.add(spec, pinned=False)
        await wire.until(lambda: len(wire.told) == 5)
        for spec in (small[1], small[3]):
            cache.use(spec.model, 0)
        cache.add(large, pinned=False)
        assert cache.state(large.model) is State.ABSENT
        cache.use(large.model, 0)
        await wire.until(lambda: cache.state(large.model) is State.CACHED)
        assert len(wire.extents(large.model)) == 3, "no two of its extents are adjacent"
        assert wire.cached(large) and wire.cached(small[1]) and wire.cached(small[3])
        assert cache.counters.evictions == 3

    serving(5, script)


def test_extents_are_not_written_before_the_instance_has_answered(specs: list[ModelSpec]) -> None:
    async def script(cache: ImageCache, wire: Wire) -> None:
        wire.answering = False
        cache.add(specs[1], pinned=False)
        await wire.until(lambda: wire.told)
        cache.add(specs[2], pinned=False)
        cache.use(specs[2].model, 0)
        assert cache.state(specs[2].model) is State.ABSENT and wire.cached(specs[1])
        cache.evicted(specs[1].model, A)
        assert cache.state(specs[2].model) is State.FILLING
        await wire.until(lambda: cache.state(specs[2].model) is State.CACHED)
        assert wire.cached(specs[2])

    serving(4, script)


@pytest.mark.parametrize("fault", ["missing", "short", "changed"])
def test_a_damaged_image_is_told_and_its_extents_are_free(fault: str, specs: list[ModelSpec]) -> None:
    bad = specs[2]
    if fault == "changed":
        weight_images.damage(bad, IMAGE_PIECE_BYTES + 1)
    else:
        Path(bad.image_path).unlink()
        if fault == "short":
            Path(bad.image_path).write_bytes(b"short")

    async def script(cache: ImageCache, wire: Wire) -> None:
        cache.add(bad, pinned=False)
        await wire.until(lambda: wire.damage)
        assert "weight image" in wire.damage[bad.model]
        assert cache.accounts()["free"] == 4 and wire.told == []
        weight_images.write(Path(bad.image_path).parent, bad.model, bad.manifest.image_bytes)
        cache.use(bad.model, 0)
        await wire.until(lambda: wire.told)
        assert wire.cached(bad)

    serving(4, script)


def test_an_image_for_which_no_file_can_be_opened_is_not_damaged(
    specs: list[ModelSpec], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was made again from its checkpoint, and the model failed where that was gone."""

    def refused(path: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def script(cache: ImageCache, wire: Wire) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(image_file.os, "open", refused)
            cache.add(specs[0], pinned=False)
            async with asyncio.timeout(WAIT_S):
                while cache.state(specs[0].model) is not State.ABSENT:
                    await asyncio.sleep(0.01)
        assert not wire.damage and not wire.told
        assert caplog.messages == ["image is not cached"]
        cache.use(specs[0].model, 0)
        await wire.until(lambda: wire.told)
        assert wire.cached(specs[0])

    serving(4, script)


def test_a_model_that_is_dropped_in_the_middle_of_its_fill_is_forgotten(specs: list[ModelSpec]) -> None:
    async def script(cache: ImageCache, wire: Wire) -> None:
        cache.add(specs[2], pinned=False)
        cache.drop(specs[2].model)
        await wire.until(lambda: wire.forgotten)
        assert wire.told == [] and wire.damage == {} and cache.accounts()["free"] == 4
        cache.add(specs[2], pinned=False)
        await wire.until(lambda: wire.told)
        assert wire.cached(specs[2])

    serving(4, script)


def test_pins_that_cannot_be_kept_are_refused(specs: list[ModelSpec]) -> None:
    async def script(cache: ImageCache, wire: Wire) -> None:
        assert cache.add(specs[1], pinned=True)
        assert not cache.add(specs[2], pinned=True)
        assert cache.add(specs[2], pinned=False)

    serving(6, script)


def test_a_cache_without_an_extent_holds_nothing_and_serves_on(specs: list[ModelSpec]) -> None:
    async def script(cache: ImageCache, wire: Wire) -> None:
        assert cache.add(specs[0], pinned=False)
        cache.use(specs[0].model, 0)
        cache.drop(specs[0].model)
        assert wire.forgotten == [specs[0].model] and wire.told == []

    serving(0, script)


class Loader:
    """An instance's books and mover, without its process."""

    def __init__(self, cache_path: str, *specs: ModelSpec) -> None:
        self._pool = CpuPool(8 * EXTENT)
        self.words = SharedWords.create(16)
        self._device = CpuDevice(self._pool.address, self.words, stream_words=range(14))
        self._kv = SharedMemory.create(EXTENT, "kv")
        host = self._device.open_host(self._kv.path, writable=True)
        self._images = CachedImages(self._device, cache_path)
        self._images.settle()
        self._stage = StageBuffer(self._device, self.words, 14)
        self.mover = MemoryExecutor(self._device, host, self._images, self._stage, slab_bytes=EXTENT, address_pages=64)
        budget = Budget(pages=8, page_bytes=EXTENT, slab_bytes=EXTENT, host_slabs=1, instances=1)
        self.ledger = Ledger(budget, self.mover.words, address_pages=64)
        self.ledger.balloon.granted(GrantPages((PageRun(0, 8),)))
        self._bases: dict[ModelId, int] = {}
        for spec in specs:
            self.ledger.add_model(spec)
        self.perform()

    def perform(self) -> list[FromInstance]:
        """What the books ask for; returns what they have to say."""
        said: list[FromInstance] = []
        for effect in self.ledger.drain():
            if isinstance(effect, Send):
                said.append(effect.message)
                continue
            self.mover.perform(effect)  # type: ignore[arg-type]
            if isinstance(effect, Bind):
                self._bases[effect.spec.model] = self.mover.weights_base(effect)
        return said

    def loaded(self, spec: ModelSpec) -> bool:
        nbytes = spec.manifest.image_bytes
        return ctypes.string_at(self._bases[spec.model], nbytes) == weight_images.content(spec.model, nbytes)

    def wait(self, event: EventHandle) -> None:
        assert self._device.wait(event, timeout_ns=WAIT_S * 1_000_000_000)

    def arrived(self, event: EventHandle) -> list[FromInstance]:
        self.wait(event)
        for progress in self.mover.progress():
            assert isinstance(progress, Progress)
            self.ledger.progress(progress.stream, progress.value)
        self.ledger.check()
        return self.perform()

    def close(self) -> None:
        self._stage.close()
        self._images.close()
        self._device.close()
        self._pool.close()
        self._kv.close()
        self.words.close()


def test_an_image_that_is_being_loaded_from_the_cache_is_overwritten_only_afterwards(specs: list[ModelSpec]) -> None:
    old, new = specs[1], specs[2]
    blocker = EventHandle(15, 1)

    async def script(cache: ImageCache, wire: Wire) -> None:
        wire.answering = False
        cache.add(old, pinned=False)
        await wire.until(lambda: wire.told)
        loader = Loader(wire.path, old)
        (cached,) = wire.told
        assert isinstance(cached, ImageCached)
        loader.ledger.on_message(cached)
        loader.mover._streams[StreamName.WEIGHTS].wait(blocker)
        event = loader.ledger.load(old.model, [])
        assert isinstance(event, EventHandle) and loader.perform() == []
        cache.add(new, pinned=False)
        cache.use(new.model, 0)
        evict = wire.told[-1]
        assert isinstance(evict, EvictImage)
        loader.ledger.on_message(evict)
        assert loader.perform() == [] and cache.state(new.model) is State.ABSENT
        loader.words.store(blocker.word, blocker.value)
        (answer,) = loader.arrived(event)
        assert answer == ImageEvicted(old.model)
        cache.evicted(old.model, A)
        await wire.until(lambda: cache.state(new.model) is State.CACHED)
        assert loader.loaded(old)
        loader.close()

    serving(4, script)


def test_while_images_come_and_go_every_load_brings_the_right_bytes(tmp_path: Path) -> None:
    sizes = [EXTENT, 2 * EXTENT - 300, 3 * EXTENT, 2 * EXTENT + 5, 4 * EXTENT]
    specs = [weight_images.write(tmp_path, f"image-{at}", nbytes) for at, nbytes in enumerate(sizes)]
    draw = random.Random(1)

    async def script(cache: ImageCache, wire: Wire) -> None:
        wire.answering = False
        loader, heard, from_cache = Loader(wire.path, *specs), 0, 0

        def hear() -> None:
            nonlocal heard
            while heard < len(wire.told):
                message = wire.told[heard]
                heard += 1
                if isinstance(message, ImageCached | EvictImage):
                    loader.ledger.on_message(message)
                answer(loader.perform())

        def answer(said: list[FromInstance]) -> None:
            for message in said:
                assert isinstance(message, ImageEvicted)
                cache.evicted(message.model, A)

        for spec in specs:
            cache.add(spec, pinned=False)
        for turn in range(80):
            spec = draw.choice(specs)
            cache.use(spec.model, turn * 2_000_000_000)
            hear()
            resident = loader.ledger.weights.resident()
            if spec.model not in resident:
                from_cache += cache.state(spec.model) is State.CACHED
                event = loader.ledger.load(spec.model, resident)
                assert isinstance(event, EventHandle)
                answer(loader.perform())
                cache.use(draw.choice(specs).model, turn * 2_000_000_000 + 1)  # may evict what is being loaded
                hear()
                await asyncio.to_thread(loader.wait, event)
                answer(loader.arrived(event))
            assert loader.loaded(spec)
        assert cache.counters.evictions > 5 and 5 < from_cache < 60
        loader.close()

    serving(7, script)
