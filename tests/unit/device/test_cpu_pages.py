"""Laws of pages: contents belong to the page, whatever address it is mapped at; an address without a page crashes."""

import ctypes
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aegis.core.ids import PageId
from aegis.device import cpu_pages
from aegis.device.cpu import CpuDevice
from aegis.device.cpu_pages import PAGE_BYTES, CpuRange, PhysicalPages, runs

PAGES, SLOTS = 8, 12

TOUCH = """
import ctypes
from aegis.device.cpu import CpuDevice
from aegis.device.shared_words import SharedWords
device = CpuDevice(8 << 20, SharedWords.create(1))
space = device.reserve(8 << 20)
space.map(0, [2, 1, 0])
ctypes.memset(space.base, 1, 6 << 20)
space.unmap(1, 1)
assert ctypes.string_at(space.base + (2 << 20) - 1, 1) == ctypes.string_at(space.base + (4 << 20), 1) == bytes([1])
print("alive", flush=True)
{touch}
print("survived")
"""


@pytest.fixture
def pages() -> Iterator[PhysicalPages]:
    pages = PhysicalPages(PAGES)
    yield pages
    pages.close()


def access(address: int) -> str:
    """The permissions of an address, as /proc/self/maps prints them: `rw-s`, `---p`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, end = (int(x, 16) for x in span.split("-"))
        if start <= address < end:
            return permissions
    return "gone"


def cell(space: CpuRange, offset_pages: int, byte: int = 0) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(space.base + offset_pages * PAGE_BYTES + byte)


@given(st.lists(st.integers(0, 20), unique=True))
def test_runs_are_adjacent_complete_and_as_long_as_can_be(ids: list[int]) -> None:
    found = list(runs(ids))
    assert [first + k for _, first, count in found for k in range(count)] == ids
    assert [index + k for index, _, count in found for k in range(count)] == list(range(len(ids)))
    assert all(a + n != b for (_, a, n), (_, b, _) in pairwise(found))


@settings(max_examples=40)
@given(st.data())
def test_contents_follow_the_page(data: st.DataObject) -> None:
    pages = PhysicalPages(PAGES)
    ranges = [CpuRange(SLOTS * PAGE_BYTES, pages) for _ in range(2)]
    places: dict[tuple[int, int], PageId] = {}
    written = dict.fromkeys(range(PAGES), 0)
    for turn in range(1, data.draw(st.integers(1, 12)) + 1):
        which, offset = data.draw(st.integers(0, 1)), data.draw(st.integers(0, SLOTS - 1))
        held = [k for k in range(offset, SLOTS) if (which, k) in places]
        if (which, offset) in places:
            count = next(n for n in range(1, SLOTS + 1) if (which, offset + n) not in places)
            count = data.draw(st.integers(1, count))
            ranges[which].unmap(offset, count)
            for k in range(offset, offset + count):
                del places[which, k]
        else:
            room = (held[0] if held else SLOTS) - offset
            free = sorted(set(range(PAGES)) - set(places.values()))
            chosen = [PageId(page) for page in data.draw(st.permutations(free))[:room]]
            ranges[which].map(offset, chosen)
            places.update({(which, offset + k): page for k, page in enumerate(chosen)})
            for k, page in enumerate(chosen):
                assert cell(ranges[which], offset + k, PAGE_BYTES - 8).value == written[page]
                written[page] = turn * PAGES + page
                cell(ranges[which], offset + k, PAGE_BYTES - 8).value = written[page]
        for (holder, k), page in places.items():
            assert cell(ranges[holder], k, PAGE_BYTES - 8).value == written[page]
    for which, space in enumerate(ranges):
        for k in range(SLOTS):
            expected = "rw-s" if (which, k) in places else "---p"
            assert access(space.base + k * PAGE_BYTES) == expected
        space.close()
    pages.close()


@pytest.mark.parametrize("carries", [True, False])
def test_the_laws_hold_where_the_kernel_carries_no_page_tables(
    carries: bool, monkeypatch: pytest.MonkeyPatch, pages: PhysicalPages
) -> None:
    if not carries:
        monkeypatch.setattr(cpu_pages, "carry", lambda *_: False)
    space = CpuRange(4 * PAGE_BYTES, pages)
    space.map(0, [PageId(3), PageId(4), PageId(1)])
    for offset in range(3):
        cell(space, offset).value = offset + 1
    space.unmap(0, 3)
    assert access(space.base) == "---p"
    space.map(1, [PageId(1), PageId(3), PageId(4)])
    assert [cell(space, offset).value for offset in (1, 2, 3)] == [3, 1, 2]
    space.close()


@pytest.mark.parametrize(
    "touch",
    ["ctypes.memset(space.base + (2 << 20), 1, 1)", "ctypes.string_at(space.base + (7 << 20), 1)"],
    ids=["unmapped", "never mapped"],
)
def test_touching_an_address_without_a_page_crashes(touch: str) -> None:
    code = TOUCH.format(touch=touch)
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert result.returncode == -signal.SIGSEGV
    assert result.stdout == "alive\n"


def test_the_copy_loop_never_faults_on_a_mapped_page(pages: PhysicalPages) -> None:
    space = CpuRange(PAGES * PAGE_BYTES, pages)
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [3, 1, 4, 0, 5, 2, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]):
        space.map(0, [PageId(page) for page in order])
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        ctypes.memset(space.base, 1, PAGES * PAGE_BYTES)
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < PAGES
        space.unmap(0, PAGES)
    space.close()


def test_memory_is_taken_once_a_page_and_given_back(pages: PhysicalPages) -> None:
    space = CpuRange(PAGES * PAGE_BYTES, pages)
    assert pages.taken_bytes == 0
    for order in ([2, 5, 7], [7, 2, 5], [5, 7, 2]):
        space.map(1, [PageId(page) for page in order])
        ctypes.memset(space.base + PAGE_BYTES, 1, 3 * PAGE_BYTES)
        assert pages.taken_bytes == 3 * PAGE_BYTES
        space.unmap(1, 3)
    space.close()


def test_reserving_a_tebibyte_takes_no_memory_and_works_at_its_end(device: CpuDevice) -> None:
    space = device.reserve(1 << 40)
    assert space.nbytes == 1 << 40
    last = (1 << 40) // PAGE_BYTES - 1
    space.map(last, [PageId(0)])
    cell(space, last, PAGE_BYTES - 8).value = 7
    assert access(space.base + (1 << 40) - PAGE_BYTES - 1) == "---p"


def test_sizes_are_rounded_up_to_pages(device: CpuDevice) -> None:
    assert device.reserve(1).nbytes == PAGE_BYTES
    assert device.reserve(PAGE_BYTES + 1).nbytes == 2 * PAGE_BYTES
    assert device.reserve(5).base % PAGE_BYTES == 0


def test_misuse_is_a_bug(pages: PhysicalPages) -> None:
    a, b = (CpuRange(4 * PAGE_BYTES, pages) for _ in range(2))
    a.map(0, [PageId(1), PageId(2)])
    with pytest.raises(AssertionError, match="mapped already"):
        b.map(0, [PageId(2)])  # a page in two places
    with pytest.raises(AssertionError, match="mapped already"):
        a.map(1, [PageId(3)])  # a place with two pages
    with pytest.raises(AssertionError, match="no pages"):
        a.map(2, [PageId(PAGES)])
    with pytest.raises(AssertionError):
        a.map(3, [PageId(3), PageId(4)])  # beyond the range
    with pytest.raises(KeyError):
        a.unmap(2, 1)
    a.close()
    b.close()


def test_closing_a_range_frees_its_pages_for_others(pages: PhysicalPages) -> None:
    a, b = (CpuRange(4 * PAGE_BYTES, pages) for _ in range(2))
    a.map(0, [PageId(0), PageId(1)])
    a.map(3, [PageId(6)])
    cell(a, 3).value = 6
    a.close()
    a.close()
    b.map(0, [PageId(6), PageId(0)])
    assert cell(b, 0).value == 6
    b.close()
