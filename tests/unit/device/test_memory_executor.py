"""Loading weights with a real device: from the model cache, from disk, given up, failed."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis.core.effects import AbandonLoad, Bind, LoadWeights, MapWeights, StreamName
from aegis.core.errors import UserError
from aegis.core.events import LoadFailed, Progress
from aegis.core.ids import PageRun
from aegis.core.model import IMAGE_EXTENT_BYTES, ModelSpec
from aegis.core.request import EventHandle
from aegis.device.cached_images import CachedImages
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import CpuPool
from aegis.device.host_memory import SharedMemory
from aegis.device.memory_executor import MemoryExecutor
from aegis.device.shared_events import SharedWords
from aegis.device.stage_buffer import StageBuffer
from tests import weight_images

EXTENT = IMAGE_EXTENT_BYTES
WAIT_NS = 20_000_000_000
BLOCKER = EventHandle(14, 1)


class Stand:
    """A mover over a device whose pages are all its own, and a model cache of 8 extents."""

    def __init__(self, pool: CpuPool, words: SharedWords) -> None:
        self.words = words
        self.device = CpuDevice(pool.address, words, stream_words=range(14))
        self.device.grant([PageRun(0, self.device.page_count)])
        self.kv, self.cache = SharedMemory.create(EXTENT, "kv"), SharedMemory.create(8 * EXTENT, "images")
        self.region = self.device.open_host(self.cache.path, writable=True, populate=False)
        self.images = CachedImages(self.device, self.cache.path)
        self.stage = StageBuffer(self.device, words, 15)
        host = self.device.open_host(self.kv.path, writable=True)
        self.mover = MemoryExecutor(
            self.device, host, self.images, self.stage, slab_bytes=EXTENT, address_pages=self.device.page_count
        )
        self.images.settle()
        self.word = self.mover.words[StreamName.WEIGHTS]
        self.loads = 0

    def bind(self, spec: ModelSpec, page: int) -> int:
        """At that page of the address space and of the pool."""
        pages = -(-spec.manifest.image_bytes // EXTENT)
        bind = Bind(spec, page)
        self.mover.perform(bind)
        self.mover.perform(MapWeights(spec.model, (PageRun(page, page + pages),)))
        return self.mover.weights_base(bind)

    def put(self, spec: ModelSpec, *runs: PageRun) -> None:
        """Its bytes into these extents of the cache."""
        content = weight_images.content(spec.model, spec.manifest.image_bytes)
        for start, stop in runs:
            part, content = content[: (stop - start) * EXTENT], content[(stop - start) * EXTENT :]
            ctypes.memmove(self.region.base + start * EXTENT, part, len(part))
        self.images.touch(runs)

    def load(self, spec: ModelSpec, *runs: PageRun) -> EventHandle:
        self.loads += 1
        event = EventHandle(self.word, self.loads)
        self.mover.perform(LoadWeights(StreamName.WEIGHTS, spec.model, event, runs))
        return event

    def progress(self, event: EventHandle) -> list[Progress | LoadFailed]:
        assert self.device.wait(event, timeout_ns=WAIT_NS)
        return self.mover.progress()


@pytest.fixture
def stand(pool: CpuPool, words: SharedWords) -> Iterator[Stand]:
    stand = Stand(pool, words)
    yield stand
    stand.stage.close()
    stand.images.close()
    stand.device.close()
    stand.cache.close()
    stand.kv.close()


def loaded(spec: ModelSpec, address: int) -> bool:
    nbytes = spec.manifest.image_bytes
    return ctypes.string_at(address, nbytes) == weight_images.content(spec.model, nbytes)


def test_a_cached_image_is_put_together_from_its_extents_and_its_file_is_left_alone(
    stand: Stand, tmp_path: Path
) -> None:
    spec = weight_images.write(tmp_path, "one", 3 * EXTENT + 100)
    base = stand.bind(spec, 2)
    runs = (PageRun(1, 2), PageRun(4, 6), PageRun(7, 8))
    stand.put(spec, *runs)
    Path(spec.image_path).unlink()
    event = stand.load(spec, *runs)
    assert stand.progress(event) == [Progress(StreamName.WEIGHTS, 1)]
    assert loaded(spec, base)


def test_loads_from_cache_and_disk_take_turns_on_the_weights_stream(stand: Stand, tmp_path: Path) -> None:
    specs = [weight_images.write(tmp_path, name, EXTENT + at) for at, name in enumerate(("one", "two", "three"))]
    bases = [stand.bind(spec, 2 * at) for at, spec in enumerate(specs)]
    stand.put(specs[1], PageRun(0, 2))
    stand.load(specs[0])
    stand.load(specs[1], PageRun(0, 2))
    assert stand.progress(stand.load(specs[2])) == [Progress(StreamName.WEIGHTS, 3)]
    assert all(map(loaded, specs, bases))
    assert not stand.mover.in_flight


def test_a_load_that_failed_is_told_before_it_counts_as_done(stand: Stand, tmp_path: Path) -> None:
    bad, good = (weight_images.write(tmp_path, name, 2 * EXTENT) for name in ("bad", "good"))
    stand.bind(bad, 0)
    base = stand.bind(good, 4)
    weight_images.damage(bad, EXTENT)
    stand.load(bad)
    failed, done = stand.progress(stand.load(good))
    assert isinstance(failed, LoadFailed) and failed.model == bad.model
    assert done == Progress(StreamName.WEIGHTS, 2)
    assert loaded(good, base)


@pytest.mark.parametrize("cached", [True, False])
def test_a_load_given_up_leaves_its_target_alone_and_its_event_passes(
    cached: bool, stand: Stand, tmp_path: Path
) -> None:
    spec = weight_images.write(tmp_path, "one", 3 * EXTENT)
    base = stand.bind(spec, 0)
    ctypes.memset(base, 0, 3 * EXTENT)
    stand.put(spec, PageRun(0, 3))
    stream = stand.mover._streams[StreamName.WEIGHTS] if cached else stand.stage._stream
    stream.wait(BLOCKER)
    event = stand.load(spec, *(PageRun(0, 3),) * cached)
    stand.mover.perform(AbandonLoad(event))
    stand.words.store(*_passed(BLOCKER))
    assert stand.progress(event) == [Progress(StreamName.WEIGHTS, 1)]
    assert ctypes.string_at(base, 3 * EXTENT) == bytes(3 * EXTENT)
    assert stand.progress(stand.load(spec)) == [Progress(StreamName.WEIGHTS, 2)]
    assert loaded(spec, base)


def test_what_a_process_finds_in_the_cache_changes_with_what_is_filled_in_later(stand: Stand, tmp_path: Path) -> None:
    first, second = (weight_images.write(tmp_path, name, 2 * EXTENT) for name in ("first", "second"))
    stand.bind(first, 0)
    base = stand.bind(second, 2)
    for spec in (first, second):
        stand.put(spec, PageRun(3, 5))
        stand.images.settle()
        stand.progress(stand.load(spec, PageRun(3, 5)))
    assert loaded(second, base)


def test_if_the_cache_cannot_be_mapped_images_come_from_disk_and_the_log_says_why(
    stand: Stand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = weight_images.write(tmp_path, "one", EXTENT)
    nowhere = CachedImages(stand.device, str(tmp_path / "nowhere"))
    with pytest.raises(UserError):
        nowhere.settle()
    assert "the model cache cannot be used: cannot map" in caplog.text
    nowhere._touch([PageRun(0, 1)])
    stand.mover._images = nowhere
    base = stand.bind(spec, 0)
    stand.progress(stand.load(spec, PageRun(0, 1)))
    assert loaded(spec, base)
    nowhere.close()


def test_loads_are_timed_one_by_one_whatever_they_come_from(stand: Stand, tmp_path: Path) -> None:
    specs = [weight_images.write(tmp_path, name, EXTENT + at) for at, name in enumerate(("one", "two"))]
    for at, spec in enumerate(specs):
        stand.bind(spec, 2 * at)
    stand.put(specs[1], PageRun(0, 2))
    asked_ns = time.monotonic_ns()
    stand.load(specs[0])
    stand.progress(stand.load(specs[1], PageRun(0, 2)))
    first, second = stand.mover.copied()
    assert asked_ns <= first.start_ns < first.stop_ns <= second.start_ns < second.stop_ns <= time.monotonic_ns()
    assert [(each.stream, each.model, each.nbytes) for each in (first, second)] == [
        (StreamName.WEIGHTS, spec.model, spec.manifest.image_bytes) for spec in specs
    ]
    assert stand.mover.copied() == []


def test_a_load_waits_before_its_time_begins(stand: Stand, tmp_path: Path) -> None:
    spec = weight_images.write(tmp_path, "one", EXTENT)
    stand.bind(spec, 0)
    stand.put(spec, PageRun(0, 1))
    stand.mover._streams[StreamName.WEIGHTS].wait(BLOCKER)
    event = stand.load(spec, PageRun(0, 1))
    opened_ns = time.monotonic_ns()
    stand.words.store(*_passed(BLOCKER))
    stand.progress(event)
    (copied,) = stand.mover.copied()
    assert copied.start_ns >= opened_ns


def test_a_load_given_up_is_not_timed_the_next_is(stand: Stand, tmp_path: Path) -> None:
    spec = weight_images.write(tmp_path, "one", EXTENT)
    stand.bind(spec, 0)
    stand.put(spec, PageRun(0, 1))
    stand.mover._streams[StreamName.WEIGHTS].wait(BLOCKER)
    event = stand.load(spec, PageRun(0, 1))
    stand.mover.perform(AbandonLoad(event))
    stand.words.store(*_passed(BLOCKER))
    stand.progress(event)
    assert stand.mover.copied() == []
    stand.progress(stand.load(spec, PageRun(0, 1)))
    assert [copied.nbytes for copied in stand.mover.copied()] == [EXTENT]


def _passed(event: EventHandle) -> tuple[int, int]:
    return event.word, event.value
