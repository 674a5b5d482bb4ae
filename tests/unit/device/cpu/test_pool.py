"""Laws of the pool: memory is taken as it is needed and a little ahead, wiped pages hold zeros and no memory."""

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.errors import UserError
from aegis.core.ids import PageRun
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.libc import map_file, release
from aegis.device.cpu.pool import PAGE_BYTES, CpuPool, TouchedPages
from aegis.device.shared_events import SharedWords

PAGES = 8


def eventually(holds: Callable[[], bool]) -> None:
    while not holds():
        os.sched_yield()


def test_memory_is_rounded_down_to_pages() -> None:
    pool = CpuPool((7 << 20) + 5)
    assert (pool.page_count, pool.page_bytes) == (3, 2 << 20)
    pool.close()


def test_less_than_a_page_is_refused() -> None:
    with pytest.raises(UserError, match="at least 2097152 bytes, not 1000"):
        CpuPool(1000)


def test_it_cannot_be_resized(pool: CpuPool) -> None:
    for nbytes in (0, 64 << 20):
        with pytest.raises(PermissionError):
            os.truncate(pool.address, nbytes)


def test_a_pool_takes_no_memory_and_wiped_pages_give_theirs_back(pool: CpuPool) -> None:
    assert pool.taken_bytes < PAGE_BYTES
    fd = os.open(pool.address, os.O_RDWR)
    address = map_file(fd, pool.page_count * PAGE_BYTES, populate=False)
    ctypes.memset(address, 7, 6 * PAGE_BYTES)
    assert pool.taken_bytes // PAGE_BYTES == 6
    pool.wipe([PageRun(0, 1), PageRun(3, 5)])
    assert pool.taken_bytes // PAGE_BYTES == 3
    contents = [ctypes.c_uint64.from_address(address + (page + 1) * PAGE_BYTES - 8).value != 0 for page in range(7)]
    assert contents == [False, True, True, False, False, True, False]
    release(address, pool.page_count * PAGE_BYTES)
    os.close(fd)


def test_a_few_pages_have_memory_before_they_are_granted(words: SharedWords) -> None:
    pool = CpuPool(PAGES * PAGE_BYTES, ahead_pages=2)
    eventually(lambda: pool.taken_bytes >= 2 * PAGE_BYTES)
    device = CpuDevice(pool.address, words)
    for granted, taken in (([PageRun(0, 1)], 3), ([PageRun(3, 4), PageRun(1, 2)], 5), ([PageRun(4, 8)], 8)):
        device.grant(granted)
        eventually(lambda taken=taken: pool.taken_bytes // PAGE_BYTES >= taken)
    device.close()
    pool.wipe([PageRun(0, PAGES)])
    eventually(lambda: pool.taken_bytes // PAGE_BYTES == 2)
    pool.close()


def test_closing_ends_the_thread_and_gives_everything_back() -> None:
    """One of another test may end meanwhile."""

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return maps.count("aegis-device"), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    before, threads = held(), set(threading.enumerate())
    for _ in range(3):
        CpuPool(4 << 20).close()
    assert held() == before
    assert not set(threading.enumerate()) - threads


@given(st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES), st.booleans()), max_size=10))
def test_touched_pages_are_what_was_marked_and_not_unmarked(changes: list[tuple[int, int, bool]]) -> None:
    fd = os.memfd_create("flags")
    os.ftruncate(fd, PAGES * PAGE_BYTES + TouchedPages.file_bytes(PAGES))
    touched, other = TouchedPages(fd, PAGES), TouchedPages(fd, PAGES)
    expected = set[int]()
    for start, count, mark in changes:
        run = PageRun(start, min(start + count, PAGES))
        if mark:
            version, news = touched.version, not expected.issuperset(range(*run))
            other.mark([run])
            assert (touched.version != version) == news
            expected.update(range(*run))
        else:
            touched.unmark(run)
            expected.difference_update(range(*run))
        assert touched.all(*run) == mark
    free = sorted(set(range(PAGES)) - expected)
    assert [touched.lowest_unmarked(count) for count in (0, 2, PAGES)] == [[], free[:2], free]
    touched.close()
    other.close()
    os.close(fd)
