"""Laws of pages: a page is reached by the process it was granted to and by no other; one that comes is ready soon."""

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.core.ids import PageRun
from aegis.device.cpu.pages import FairLock, PhysicalPages
from aegis.device.cpu.pool import PAGE_BYTES, CpuPool
from aegis.device.cpu.ranges import CpuRange

PAGES = 16


@pytest.fixture
def pages(pool: CpuPool) -> Iterator[PhysicalPages]:
    pages = PhysicalPages(pool.address)
    yield pages
    pages.close()


def access(pages: PhysicalPages, page: int) -> str:
    """The permissions of a page's home, as /proc/self/maps prints them: `rw-s`, `---s`."""
    address = pages._address(page)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, end = (int(x, 16) for x in span.split("-"))
        if start <= address < end:
            return permissions
    return "gone"


def resident(pages: PhysicalPages, page: int) -> bool:
    """Whether all entries of a page's home are filled: bit 63 of /proc/self/pagemap."""
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(pages._address(page) // 4096 * 8)
        entries = pagemap.read(PAGE_BYTES // 4096 * 8)
    return all(entry & 0x80 for entry in entries[7::8])


def until_ready(pages: PhysicalPages, count: int) -> None:
    while pages._state.count(3) < count:
        os.sched_yield()


def test_granted_pages_are_made_ready_in_the_background(pages: PhysicalPages) -> None:
    assert not any(resident(pages, page) for page in range(PAGES))
    pages.grant([PageRun(2, 5), PageRun(9, 10)])
    until_ready(pages, 4)
    for page in range(PAGES):
        ours = page in (2, 3, 4, 9)
        assert resident(pages, page) == ours
        assert access(pages, page) == ("rw-s" if ours else "---s")


def test_revoked_pages_are_out_of_reach_even_at_home_and_come_back_ready(pages: PhysicalPages) -> None:
    space = CpuRange(4 * PAGE_BYTES, pages)
    pages.grant([PageRun(0, 4)])
    space.map(0, [PageRun(0, 4)])
    space.unmap(0, 4)
    pages.revoke([PageRun(1, 3)])
    assert [access(pages, page) for page in range(5)] == ["rw-s", "---s", "---s", "rw-s", "---s"]
    pages.grant([PageRun(1, 2)])
    until_ready(pages, 3)
    assert [access(pages, page) for page in range(5)] == ["rw-s", "rw-s", "---s", "rw-s", "---s"]
    space.close()


def test_what_one_process_leaves_in_a_page_the_next_one_finds(pool: CpuPool, pages: PhysicalPages) -> None:
    other = PhysicalPages(pool.address)
    for value, owner in enumerate((pages, other, pages, other)):
        owner.grant([PageRun(5, 7)])
        space = CpuRange(2 * PAGE_BYTES, owner)
        space.map(0, [PageRun(5, 7)])
        cell = ctypes.c_uint64.from_address(space.base + 2 * PAGE_BYTES - 8)
        assert cell.value == value
        cell.value += 1
        space.close()
        owner.revoke([PageRun(5, 7)])
    other.close()


def test_wiped_pages_are_zeros_and_may_be_mapped_again(pages: PhysicalPages) -> None:
    space = CpuRange(PAGES * PAGE_BYTES, pages)
    pages.grant([PageRun(0, PAGES)])
    space.map(0, [PageRun(0, PAGES)])
    ctypes.memset(space.base, 1, PAGES * PAGE_BYTES)
    space.unmap(4, 4)
    pages.start_wiping([PageRun(4, 6), PageRun(7, 8)])
    pages.wipe(4, 6)
    pages.wipe(7, 8)
    space.map(4, [PageRun(4, 8)])
    assert ctypes.string_at(space.base + 3 * PAGE_BYTES, 6 * PAGE_BYTES) == b"".join(
        bytes([page in (3, 6, 8)]) * PAGE_BYTES for page in range(3, 9)
    )
    space.close()


def test_entries_that_a_wiped_pool_took_along_are_filled_again(pool: CpuPool, pages: PhysicalPages) -> None:
    pages.grant([PageRun(0, 2)])
    until_ready(pages, 2)
    pages.revoke([PageRun(0, 2)])
    pool.wipe([PageRun(0, 1)])
    pages.grant([PageRun(0, 2)])
    until_ready(pages, 2)
    assert resident(pages, 0)
    assert resident(pages, 1)


def test_misuse_is_a_bug(pages: PhysicalPages) -> None:
    space = CpuRange(4 * PAGE_BYTES, pages)
    with pytest.raises(AssertionError, match="page 3 is not ours"):
        space.map(0, [PageRun(3, 4)])
    with pytest.raises(AssertionError, match="page 3 is not ours"):
        pages.revoke([PageRun(3, 4)])
    with pytest.raises(AssertionError, match=r"no pages \[15, 17\)"):
        pages.grant([PageRun(15, 17)])
    pages.grant([PageRun(3, 5)])
    with pytest.raises(AssertionError, match="page 4 is ours"):
        pages.grant([PageRun(4, 6)])
    space.map(0, [PageRun(3, 4)])
    with pytest.raises(AssertionError, match="page 3 is mapped already"):
        pages.revoke([PageRun(3, 5)])
    with pytest.raises(AssertionError, match="page 3 is mapped already"):
        pages.start_wiping([PageRun(3, 4)])
    pages.start_wiping([PageRun(4, 5)])
    with pytest.raises(AssertionError, match="page 4 is being wiped"):
        space.map(1, [PageRun(4, 5)])
    with pytest.raises(AssertionError, match="page 4 is being wiped"):
        pages.revoke([PageRun(4, 5)])
    space.close()


def test_a_pool_that_is_gone_cannot_be_opened() -> None:
    pool = CpuPool(4 << 20, ahead_pages=0)
    pool.close()
    with pytest.raises(UserError, match="cannot open the memory of the device at /proc/"):
        PhysicalPages(pool.address)


def test_whoever_waits_at_the_turnstile_comes_before_who_has_just_passed() -> None:
    lock, order, inside = FairLock(), list[str](), threading.Event()

    def greedy() -> None:
        with lock:
            inside.set()
            while not lock._next.locked():  # until the other one waits
                os.sched_yield()
            order.append("first")
        with lock:
            order.append("third")

    thread = threading.Thread(target=greedy)
    thread.start()
    inside.wait()
    with lock:
        order.append("second")
    thread.join()
    assert order == ["first", "second", "third"]
