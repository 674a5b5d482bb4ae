"""The cost of moving physical memory on the CPU device: mapping, reserving, first touches, wiping.

Pages are recycled: their memory was taken and their page tables were filled before, as in all but the first minutes of
a server. `overhead` compares mapping and unmapping, with the accounts that say which pages, with the very system calls
that it issues, which are repeated beside it: same functions, same sizes, same places, no accounts.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct

from aegis.core.ids import PageRun
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.libc import carry, clear, map_file, populate, protect, release, reserve, reserve_file
from aegis.device.cpu.pages import AddressSpace
from aegis.device.cpu.pool import AHEAD_PAGES, PAGE_BYTES, CpuPool
from aegis.device.cpu.ranges import CpuRange
from aegis.device.host_memory import SharedMemory
from aegis.device.shared_events import SharedWords
from memory.pages import NoPages, PagePool, Runs

BATCHES = (1, 8, 64)
_PAGES = 256
_TIMEOUT_NS = 60_000_000_000


class Mapping(Struct, frozen=True):
    """Medians, per page of 2 MiB, of mapping and unmapping `batch` pages at once; `scattered`: no two are adjacent.

    `plain_ns` is mmap with MAP_POPULATE and munmap of as many recycled pages: mapping without carried page tables.
    """

    batch: int
    scattered: bool
    map_ns: float
    unmap_ns: float
    calls_ns: float  # the system calls of both
    overhead: float
    plain_ns: float


class Reserving(Struct, frozen=True):
    """Address space for life: there is no cost at a first touch later but that of the pages."""

    nbytes: int
    reserve_ns: int


class FirstTouch(Struct, frozen=True):
    """From the grant of a page to its last byte written, per page whose memory is new; with memory taken `ahead`, and
    without. `recycled_ns` is for pages that another process had before, and `returned_ns` for those we had ourselves.
    """

    ahead_ns: float
    bare_ns: float
    recycled_ns: float
    returned_ns: float


class Wiping(Struct, frozen=True):
    """Per page: zeroed and out of reach, by a stream; by memset alone; and given back to the operating system."""

    stream_ns: float
    memset_ns: float
    punch_ns: float


class Ground:
    """A pool whose pages have memory, a device that was granted them all, and a range of as many."""

    def __init__(self, pages: int = _PAGES) -> None:
        self.pool = CpuPool(pages * PAGE_BYTES, ahead_pages=0)
        self.words = SharedWords.create(4)
        self.device = CpuDevice(self.pool.address, self.words)
        self.everything = [PageRun(0, pages)]
        self.device.grant(self.everything)
        self.space: CpuRange = self.device.reserve(pages * PAGE_BYTES)
        self.space.map(0, self.everything)
        ctypes.memset(self.space.base, 1, self.space.nbytes)
        self.space.unmap(0, pages)

    def close(self) -> None:
        self.device.close()
        self.pool.close()
        self.words.close()


class BareCalls:
    """The system calls of mapping and unmapping without anything around them: a home, and a place to carry pages to."""

    def __init__(self, pages: int = _PAGES) -> None:
        self._memory = SharedMemory.create(pages * PAGE_BYTES, "bare")
        self._fd = os.open(self._memory.path, os.O_RDWR)
        self._home, self._space = AddressSpace(pages), AddressSpace(pages)
        reserve_file(self._fd, pages * PAGE_BYTES, self._home.base)
        protect(self._home.base, pages * PAGE_BYTES, access=True)
        populate(self._home.base, pages * PAGE_BYTES)

    def map_and_unmap(self, runs: Runs, count: int) -> None:
        home, to, at = self._home.base, self._space.base, self._space.base
        for start, stop in runs:
            carry(home + start * PAGE_BYTES, to, (stop - start) * PAGE_BYTES)
            to += (stop - start) * PAGE_BYTES
        for start, stop in runs:
            carry(at, home + start * PAGE_BYTES, (stop - start) * PAGE_BYTES)
            at += (stop - start) * PAGE_BYTES
        reserve(count * PAGE_BYTES, self._space.base)

    def plainly(self, runs: Runs) -> None:
        for start, stop in runs:
            nbytes = (stop - start) * PAGE_BYTES
            release(map_file(self._fd, nbytes, offset=start * PAGE_BYTES), nbytes)

    def close(self) -> None:
        self._home.close()
        self._space.close()
        os.close(self._fd)
        self._memory.close()


def mapping(batch: int, *, scattered: bool = False, repetitions: int = 200) -> Mapping:
    ground, bare = Ground(), BareCalls()
    books = PagePool(ground.everything)
    if scattered:
        every = books.take("fragment", _PAGES)
        assert not isinstance(every, NoPages)
        books.give("fragment", [PageRun(page, page + 1) for page in range(0, _PAGES, 2)])
    maps_ns, unmaps_ns, calls_ns, plain_ns, overheads = [], [], [], [], []
    for turn in range(repetitions):
        start_ns = time.perf_counter_ns()
        runs = books.take("bench", batch)
        assert not isinstance(runs, NoPages)
        ground.space.map(0, runs)
        mapped_ns = time.perf_counter_ns()
        ground.space.unmap(0, batch)
        books.give("bench", runs)
        done_ns = time.perf_counter_ns()
        calls_ns.append(timed(partial(bare.map_and_unmap, runs, batch)))
        if turn % 20 == 0:
            plain_ns.append(timed(partial(bare.plainly, runs)))
        maps_ns.append(mapped_ns - start_ns)
        unmaps_ns.append(done_ns - mapped_ns)
        overheads.append((done_ns - start_ns) / calls_ns[-1] - 1)
    ground.close()
    bare.close()
    per_page = [statistics.median(durations) / batch for durations in (maps_ns, unmaps_ns, calls_ns, plain_ns)]
    return Mapping(
        batch=batch,
        scattered=scattered,
        map_ns=per_page[0],
        unmap_ns=per_page[1],
        calls_ns=per_page[2],
        overhead=statistics.median(overheads),
        plain_ns=per_page[3],
    )


def reserving(nbytes: int, repetitions: int = 21) -> Reserving:
    ground = Ground(1)
    durations_ns = [timed(lambda: ground.device.reserve(nbytes)) for _ in range(repetitions)]
    ground.close()
    return Reserving(nbytes, round(statistics.median(durations_ns)))


def first_touch(pages: int = AHEAD_PAGES) -> FirstTouch:
    def touched(device: CpuDevice) -> float:
        space = device.reserve(pages * PAGE_BYTES)
        start_ns = time.perf_counter_ns()
        device.grant([PageRun(0, pages)])
        space.map(0, [PageRun(0, pages)])
        clear(space.base, space.nbytes)
        duration_ns = time.perf_counter_ns() - start_ns
        space.close()
        device.revoke([PageRun(0, pages)])
        return duration_ns / pages

    words = SharedWords.create(1)
    results = []
    for ahead_pages in (pages, 0):
        pool = CpuPool(2 * pages * PAGE_BYTES, ahead_pages=ahead_pages)
        while pool.taken_bytes < ahead_pages * PAGE_BYTES:
            time.sleep(0.001)
        device, other = CpuDevice(pool.address, words), CpuDevice(pool.address, words)
        results.append((touched(device), touched(other), touched(device)))
        device.close()
        other.close()
        pool.close()
    words.close()
    (ahead_ns, _, _), (bare_ns, recycled_ns, returned_ns) = results
    return FirstTouch(ahead_ns=ahead_ns, bare_ns=bare_ns, recycled_ns=recycled_ns, returned_ns=returned_ns)


def wiping(pages: int = 64, repetitions: int = 9) -> Wiping:
    ground = Ground(pages)
    stream = ground.device.stream("scrub")

    def wipe() -> None:
        assert ground.device.wait(stream.wipe(ground.everything), timeout_ns=_TIMEOUT_NS)

    wipes_ns, memsets_ns = [], []
    for _ in range(repetitions):
        ground.space.map(0, ground.everything)
        memsets_ns.append(timed(lambda: clear(ground.space.base, ground.space.nbytes)))
        ground.space.unmap(0, pages)
        wipes_ns.append(timed(wipe))
    ground.device.revoke(ground.everything)
    punch_ns = timed(lambda: ground.pool.wipe(ground.everything))
    ground.close()
    return Wiping(statistics.median(wipes_ns) / pages, statistics.median(memsets_ns) / pages, punch_ns / pages)


def timed(action: Callable[[], object]) -> int:
    start_ns = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - start_ns


def mappings(batches: Sequence[int] = BATCHES) -> tuple[Mapping, ...]:
    return (*(mapping(batch) for batch in batches), mapping(batches[-1], scattered=True))
