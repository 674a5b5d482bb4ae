"""How long the weights of a model take to its device: from the model cache, from disk, and into the cache.

For each size, beside a plain memcpy of as many bytes by the calling thread:

* cached: the image lies in one run of extents of the node's model cache; scattered: no two of its extents are adjacent;
* warm: it comes from its file through the stage buffer, each piece checked, and the system has the file in memory;
* cold: the same after the system was told to drop the file (which it may decline, and a virtual disk may have a cache);
* read: the cold file read by one thread in a row, which is what the disk gives;
* fill, warm and cold: what a miss takes until the image is cached, beside serving.

A miss costs its request a load from disk instead of one from the cache: `miss_ns` more.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from aegis.core.effects import Bind, LoadWeights, MapWeights, StreamName
from aegis.core.ids import InstanceId, ModelId, PageRun
from aegis.core.messages import ImageCached, ToInstance
from aegis.core.model import IMAGE_EXTENT_BYTES, KvLayer, KvShape, Manifest, ModelSpec
from aegis.core.request import EventHandle
from aegis.device.cached_images import CachedImages
from aegis.device.cpu.libc import copy
from aegis.device.host_memory import SharedMemory
from aegis.device.image_file import checksums
from aegis.device.memory_executor import MemoryExecutor
from aegis.device.open_device import create_pool, open_device
from aegis.device.shared_events import SharedWords
from aegis.device.stage_buffer import STAGE_WORDS, StageBuffer
from aegis.node.image_cache import ImageCache
from aegis.node.image_filler import ImageFiller

SIZES = (64 << 20, 256 << 20, 1 << 30)
_MODEL = ModelId("image")
_TIMEOUT_NS = 120_000_000_000
_CHUNK_BYTES = 1 << 20


class SizeResult(Struct, frozen=True):
    """Medians over `repetitions`; ratios are medians of the quotients by the memcpy that followed."""

    nbytes: int
    repetitions: int
    memcpy_ns: int
    cached_ns: int
    cached_ratio: float
    scattered_ns: int
    scattered_ratio: float
    warm_ns: int
    warm_ratio: float
    cold_ns: int
    read_ns: int
    fill_warm_ns: int
    fill_cold_ns: int

    @property
    def miss_ns(self) -> int:
        return self.warm_ns - self.cached_ns


class Bench:
    """One instance's mover over a device of `nbytes`, and a cache region of twice as much."""

    def __init__(self, spec: ModelSpec, kind: str) -> None:
        nbytes = spec.manifest.image_bytes
        extents = nbytes // IMAGE_EXTENT_BYTES
        self._spec = spec
        self._words = SharedWords.create(len(StreamName) + STAGE_WORDS)
        self._pool = create_pool(kind, nbytes)
        words = range(self._words.count)
        self._device = open_device(kind, self._pool.address, self._words, stream_words=words[:-1])
        self._memory = [SharedMemory.create(n, "bench") for n in (IMAGE_EXTENT_BYTES, 2 * nbytes, nbytes, nbytes)]
        kv, self._source, *ends = (self._device.open_host(m.path, writable=True) for m in self._memory)
        for region in (self._source, *ends):
            ctypes.memset(region.base, 1, region.nbytes)
        self._ends = ends
        self._images = CachedImages(self._device, self._memory[1].path)
        self._images.touch([PageRun(0, 2 * extents)])
        self._images.settle()
        self._stage = StageBuffer(self._device, self._words, words[-1])
        self._mover = MemoryExecutor(
            self._device, kv, self._images, self._stage, slab_bytes=IMAGE_EXTENT_BYTES, address_pages=extents
        )
        self._event = EventHandle(self._mover.words[StreamName.WEIGHTS], 0)
        self._device.grant([PageRun(0, extents)])
        self._mover.perform(Bind(spec, 0))
        self._mover.perform(MapWeights(_MODEL, (PageRun(0, extents),)))
        self.load(())  # the device's memory is taken from the system

    def load(self, extents: tuple[PageRun, ...]) -> None:
        """Waits until it has arrived."""
        self._event = EventHandle(self._event.word, self._event.value + 1)
        self._mover.perform(LoadWeights(StreamName.WEIGHTS, _MODEL, self._event, extents))
        assert self._device.wait(self._event, timeout_ns=_TIMEOUT_NS)
        self._mover.progress()

    def memcpy(self) -> None:
        copy(self._ends[1].base, self._ends[0].base, self._spec.manifest.image_bytes)

    def close(self) -> None:
        self._stage.close()
        self._images.close()
        self._device.close()
        self._pool.close()
        for memory in self._memory:
            memory.close()
        self._words.close()


class _Told:
    """An instance that only listens."""

    def __init__(self) -> None:
        self.cached = asyncio.Event()

    def post(self, instance: InstanceId, message: ToInstance) -> None:
        del instance
        assert isinstance(message, ImageCached)
        self.cached.set()

    def image_forgotten(self, model: ModelId) -> None:
        raise AssertionError(model)

    def image_damaged(self, model: ModelId, reason: str) -> None:
        raise AssertionError(f"{model}: {reason}")


def measure(nbytes: int, repetitions: int, *, kind: str = "cpu") -> SizeResult:
    """`nbytes` is a whole number of extents."""
    extents = nbytes // IMAGE_EXTENT_BYTES
    together = (PageRun(0, extents),)
    scattered = tuple(PageRun(at, at + 1) for at in range(0, 2 * extents, 2))
    with tempfile.TemporaryDirectory(prefix="aegis-bench-") as directory:
        spec = _written(Path(directory) / "image.bin", nbytes)
        bench = Bench(spec, kind)
        cached = _beside(bench, repetitions, lambda: bench.load(together))
        apart = _beside(bench, repetitions, lambda: bench.load(scattered))
        warm = _beside(bench, repetitions, lambda: bench.load(()))
        cold_ns = _median(_timed(lambda: bench.load(()), before=lambda: _drop(spec)) for _ in range(repetitions))
        bench.close()
        read_ns = _median(_timed(lambda: _read(spec), before=lambda: _drop(spec)) for _ in range(repetitions))
        _read(spec)
        fill_warm_ns = _median(asyncio.run(_fill(spec)) for _ in range(repetitions))
        fill_cold_ns = _median(_fill_cold(spec) for _ in range(repetitions))
    return SizeResult(
        nbytes=nbytes,
        repetitions=repetitions,
        memcpy_ns=_median(ns for pairs in (cached, apart, warm) for _, ns in pairs),
        cached_ns=_median(ns for ns, _ in cached),
        cached_ratio=statistics.median(a / b for a, b in cached),
        scattered_ns=_median(ns for ns, _ in apart),
        scattered_ratio=statistics.median(a / b for a, b in apart),
        warm_ns=_median(ns for ns, _ in warm),
        warm_ratio=statistics.median(a / b for a, b in warm),
        cold_ns=cold_ns,
        read_ns=read_ns,
        fill_warm_ns=fill_warm_ns,
        fill_cold_ns=fill_cold_ns,
    )


def measure_all(sizes: Sequence[int] = SIZES, repetitions: int = 5, *, kind: str = "cpu") -> tuple[SizeResult, ...]:
    return tuple(measure(nbytes, repetitions, kind=kind) for nbytes in sizes)


def _beside(bench: Bench, repetitions: int, load: Callable[[], None]) -> list[tuple[int, int]]:
    """Durations of loads, each with that of the memcpy after it."""
    return [(_timed(load), _timed(bench.memcpy)) for _ in range(repetitions)]


def _timed(action: Callable[[], object], *, before: Callable[[], object] | None = None) -> int:
    if before is not None:
        before()
    start_ns = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - start_ns


async def _fill(spec: ModelSpec) -> int:
    """Into a cache whose memory the system has still to give: the worst case."""
    filler = ImageFiller(spec.manifest.image_bytes)
    cache = ImageCache(filler)
    told = cache.wire = _Told()
    cache.join(InstanceId("listener"))
    start_ns = time.perf_counter_ns()
    cache.add(spec, pinned=False)
    await told.cached.wait()
    duration_ns = time.perf_counter_ns() - start_ns
    cache.close()
    filler.close()
    return duration_ns


def _fill_cold(spec: ModelSpec) -> int:
    _drop(spec)
    return asyncio.run(_fill(spec))


def _read(spec: ModelSpec) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(spec.image_path, "rb", buffering=0) as file:  # noqa: PTH123
        while file.readinto(buffer):
            pass


def _drop(spec: ModelSpec) -> None:
    """Asks the system to forget what it holds of the file."""
    fd = os.open(spec.image_path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _written(path: Path, nbytes: int) -> ModelSpec:
    """An image of which only size and bytes matter."""
    block = os.urandom(_CHUNK_BYTES)
    with path.open("wb") as file:
        for at in range(0, nbytes, _CHUNK_BYTES):
            file.write(block[: nbytes - at])
        file.flush()
        os.fsync(file.fileno())  # what is not on disk yet cannot be forgotten
    manifest = Manifest(
        fingerprint="",
        architecture="",
        dtype="float32",
        image_bytes=nbytes,
        tensors=(),
        kv=KvShape((KvLayer(heads=1, key_dim=1, value_dim=1),), "float32", 4),
        context_tokens=1,
        vocab_size=1,
        eos_token_ids=(),
        hidden_size=1,
        intermediate_size=1,
        parameters=1,
        checksums=checksums(str(path)),
    )
    return ModelSpec(_MODEL, manifest, "", str(path), "")


def _median(values: Iterable[int]) -> int:
    return round(statistics.median(values))
