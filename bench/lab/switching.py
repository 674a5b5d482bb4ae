"""How long a model switch takes, against a plain memcpy of as many bytes.

Two models take turns in a device memory that holds one. For each size:

* first: the device's memory is taken from the operating system on the way;
* switch: the other model is evicted, this one's pages are mapped, its image is copied by the weights stream and the
  event awaited, all through an instance's own books: what every later activation costs;
* fragmented: the same where no two free pages are adjacent: the worst case for mapping;
* prefetched: the model was loaded while the other one was active, in a memory that holds both; only the promotion is
  timed: the books say it is resident, and its first and last bytes are read.

Each switch is followed by libc's memcpy of as many bytes by the calling thread, between two buffers of the same kind
that nothing else touches: neither side finds its bytes in a cache that the other has just filled. `ratio` is the median
of the quotients of such neighbours, so that a machine whose speed drifts does not spoil it.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec

from msgspec import Struct

from aegis.core.effects import AcceptPages, Bind, LoadWeights, MapWeights, UnmapWeights
from aegis.core.events import Progress
from aegis.core.ids import ModelId, PageRun
from aegis.core.messages import GrantPages, ImageCached
from aegis.core.model import IMAGE_EXTENT_BYTES, KvLayer, KvShape
from aegis.core.request import EventHandle
from aegis.device.cached_images import CachedImages
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.libc import copy
from aegis.device.cpu.pool import PAGE_BYTES, CpuPool
from aegis.device.host_memory import SharedMemory
from aegis.device.memory_executor import MemoryExecutor
from aegis.device.shared_events import SharedWords
from aegis.device.stage_buffer import StageBuffer
from bench.common import result_files
from bench.common.machine import Machine, describe
from bench.lab.sized_models import spec_of
from memory.budget import Budget
from memory.ledger import Ledger
from memory.pages import NoPages, PagePool

SIZES = tuple(mib << 20 for mib in (64, 128, 256, 512, 1024))
_TIMEOUT_NS = 60_000_000_000
_BYTES_PER_SIZE = 2 << 30  # small sizes are repeated until they have copied as much, at most 32 times
_SHAPE = KvShape((KvLayer(heads=1, key_dim=1, value_dim=1),), "float32", 4)
P = ParamSpec("P")


class SizeResult(Struct, frozen=True):
    """Medians over `repetitions` switches each way; `first_ns` was seen once. `prefetched_bytes` were copied by all
    promotions together."""

    nbytes: int
    repetitions: int
    first_ns: int
    switch_ns: int
    memcpy_ns: int
    ratio: float
    fragmented_ns: int
    fragmented_ratio: float
    prefetched_ns: int
    prefetched_bytes: int


class Result(Struct, frozen=True):
    machine: Machine
    sizes: tuple[SizeResult, ...]


class TwoModels:
    """Two models of `nbytes` (whole pages), A = 0 and B = 1, on an instance's books and memory of `pages` pages."""

    def __init__(self, nbytes: int, *, pages: int, fragmented: bool = False) -> None:
        self.nbytes = nbytes
        self.loaded_bytes = 0  # by copies of images
        self._words = SharedWords.create(8)
        self._kv = SharedMemory.create(PAGE_BYTES, "kv")
        self._cache = SharedMemory.create(2 * nbytes, "images")
        self._pool = CpuPool(pages * PAGE_BYTES, ahead_pages=0)
        self.device = CpuDevice(self._pool.address, self._words, stream_words=range(7))
        cache = self.device.open_host(self._cache.path, writable=True)
        for model in (0, 1):
            ctypes.memset(cache.base + model * nbytes, model + 1, nbytes)
        self._plain = [SharedMemory.create(nbytes, f"plain-{end}") for end in ("from", "to")]
        self._ends = [self.device.open_host(memory.path, writable=True) for memory in self._plain]
        for end in self._ends:
            ctypes.memset(end.base, 1, nbytes)
        host = self.device.open_host(self._kv.path, writable=True)
        self._images = CachedImages(self.device, self._cache.path)
        self._stage = StageBuffer(self.device, self._words, 7)
        self._mover = MemoryExecutor(
            self.device, host, self._images, self._stage, slab_bytes=PAGE_BYTES, address_pages=4 * pages
        )
        budget = Budget(pages=pages, page_bytes=PAGE_BYTES, slab_bytes=PAGE_BYTES, host_slabs=1, instances=1)
        self._ledger = Ledger(budget, self._mover.words, address_pages=4 * pages)
        self._ledger.balloon.granted(GrantPages((PageRun(0, pages),)))
        self._perform()
        self._specs = [spec_of(ModelId(str(model)), _SHAPE, image_bytes=nbytes) for model in (0, 1)]
        self._bases = [self._bind(model) for model in (0, 1)]
        self._images.settle()
        if fragmented:
            _fragment(self._ledger.pool)

    def load(self, model: int) -> EventHandle:
        """Admits the model, evicting the other if need be, maps its pages and starts the copy."""
        event = self._ledger.load(self._specs[model].model, [self._specs[1 - model].model])
        assert not isinstance(event, NoPages)
        self._perform()
        return event

    def arrived(self, event: EventHandle) -> None:
        """Waits for the copy and books it."""
        assert self.device.wait(event, timeout_ns=_TIMEOUT_NS)
        for progress in self._mover.progress():
            assert isinstance(progress, Progress)
            self._ledger.progress(progress.stream, progress.value)

    def promote(self, model: int) -> None:
        """The time of a switch to a model that is there: a look at the accounts, and here at both ends of its bytes."""
        assert self._ledger.weights.is_resident(self._specs[model].model)
        self._perform()
        for address in (self._bases[model], self._bases[model] + self.nbytes - 1):
            assert ctypes.c_ubyte.from_address(address).value == model + 1

    def evict(self, model: int) -> None:
        self._ledger.evict(self._specs[model].model)
        self._perform()

    def switch_to(self, model: int) -> None:
        self.arrived(self.load(model))
        self.promote(model)

    def memcpy(self) -> None:
        copy(self._ends[1].base, self._ends[0].base, self.nbytes)

    def close(self) -> None:
        self._stage.close()
        self._images.close()
        self.device.close()
        self._pool.close()
        for memory in (self._cache, *self._plain, self._kv):
            memory.close()
        self._words.close()

    def _bind(self, model: int) -> int:
        spec, extents = self._specs[model], self.nbytes // IMAGE_EXTENT_BYTES
        cached = (PageRun(model * extents, (model + 1) * extents),)
        self._ledger.on_message(ImageCached(spec.model, cached))
        self._images.touch(cached)
        assert self._ledger.add_model(spec)
        (bind,) = self._ledger.drain()
        assert isinstance(bind, Bind)
        self._mover.perform(bind)
        return self._mover.weights_base(bind)

    def _perform(self) -> None:
        for effect in self._ledger.drain():
            assert isinstance(effect, AcceptPages | MapWeights | UnmapWeights | LoadWeights)
            self._mover.perform(effect)
            if isinstance(effect, LoadWeights):
                self.loaded_bytes += self.nbytes


def _fragment(pool: PagePool) -> None:
    """Leaves every other page free: no two adjacent ones."""
    taken = [pool.take("fragment", 1) for _ in range(pool.capacity)]
    for pages in taken[::2]:
        assert not isinstance(pages, NoPages)
        pool.give("fragment", pages)


def run(json_path: Path | None = None, sizes: Sequence[int] = SIZES, repetitions: int = 9) -> Result:
    """Measures, prints a table and writes it to `json_path`. Raises UserError.

    Sizes are in bytes, whole pages. Each way is switched at least `repetitions` times.
    """
    if json_path is not None:
        result_files.check(json_path)
    results = []
    print("     size      first     switch     memcpy  ratio fragmented  ratio  prefetched  copied")
    for nbytes in sizes:
        result = measure(nbytes, max(repetitions, min(32, _BYTES_PER_SIZE // nbytes)))
        results.append(result)
        print(_row(result))
    whole = Result(describe(), tuple(results))
    if json_path is not None:
        result_files.write_json(json_path, whole)
    return whole


def measure(nbytes: int, repetitions: int) -> SizeResult:
    count = nbytes // PAGE_BYTES
    models = TwoModels(nbytes, pages=count)
    first_ns = _timed(models.switch_to, 0)
    switch_ns, memcpy_ns = _alternate(models, repetitions)
    models.close()
    models = TwoModels(nbytes, pages=2 * count, fragmented=True)
    models.switch_to(0)
    fragmented_ns, beside_ns = _alternate(models, repetitions)
    models.close()
    prefetched_ns, prefetched_bytes = _prefetched(nbytes, repetitions)
    return SizeResult(
        nbytes=nbytes,
        repetitions=repetitions,
        first_ns=first_ns,
        switch_ns=_median(switch_ns),
        memcpy_ns=_median(memcpy_ns),
        ratio=_ratio(switch_ns, memcpy_ns),
        fragmented_ns=_median(fragmented_ns),
        fragmented_ratio=_ratio(fragmented_ns, beside_ns),
        prefetched_ns=prefetched_ns,
        prefetched_bytes=prefetched_bytes,
    )


def _alternate(models: TwoModels, repetitions: int) -> tuple[list[int], list[int]]:
    """Durations of switches, and of the memcpy after each; A is active before, and again afterwards."""
    switches_ns, copies_ns = [], []
    for turn in range(2 * repetitions):
        model = (turn + 1) % 2
        switches_ns.append(_timed(models.switch_to, model))
        copies_ns.append(_timed(models.memcpy))
    return switches_ns, copies_ns


def _prefetched(nbytes: int, repetitions: int) -> tuple[int, int]:
    """The median duration of a promotion, and bytes copied by all of them."""
    models = TwoModels(nbytes, pages=2 * nbytes // PAGE_BYTES)
    models.switch_to(0)
    durations_ns, copied_bytes = [], 0
    for turn in range(repetitions):
        model = (turn + 1) % 2
        models.arrived(models.load(model))
        before_bytes = models.loaded_bytes
        durations_ns.append(_timed(models.promote, model))
        copied_bytes += models.loaded_bytes - before_bytes
        models.evict(1 - model)
    models.close()
    return _median(durations_ns), copied_bytes


def _timed(action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> int:
    start_ns = time.perf_counter_ns()
    action(*args, **kwargs)
    return time.perf_counter_ns() - start_ns


def _median(values: Sequence[int]) -> int:
    return round(statistics.median(values))


def _ratio(numerators: Sequence[int], denominators: Sequence[int]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def _row(r: SizeResult) -> str:
    def ms(ns: int) -> str:
        return f"{ns / 1e6:8.2f}ms"

    return (
        f"{r.nbytes >> 20:6d}MiB {ms(r.first_ns)} {ms(r.switch_ns)} {ms(r.memcpy_ns)} {r.ratio:6.3f}"
        f" {ms(r.fragmented_ns)} {r.fragmented_ratio:6.3f} {r.prefetched_ns / 1e6:9.4f}ms {r.prefetched_bytes:6d}B"
    )
