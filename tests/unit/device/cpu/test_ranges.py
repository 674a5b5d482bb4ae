"""Laws of ranges: contents belong to the page, whatever address it is mapped at; an address without a page crashes."""

import ctypes
import resource
import signal
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aegis.core.ids import PageRun
from aegis.device.cpu import pages as cpu_pages
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pages import PhysicalPages
from aegis.device.cpu.pool import PAGE_BYTES, CpuPool
from aegis.device.cpu.ranges import CpuRange

PAGES, SLOTS = 8, 12

TOUCH = """
import ctypes
from aegis.core.ids import PageRun
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import CpuPool
from aegis.device.shared_events import SharedWords
pool = CpuPool(8 << 20)
device = CpuDevice(pool.address, SharedWords.create(1))
device.grant([PageRun(0, 3)])
space = device.reserve(8 << 20)
space.map(0, [PageRun(1, 3), PageRun(0, 1)])
ctypes.memset(space.base, 1, 6 << 20)
space.unmap(1, 1)
assert ctypes.string_at(space.base + (2 << 20) - 1, 1) == ctypes.string_at(space.base + (4 << 20), 1) == bytes([1])
home = device._pages._address(0)
print("alive", flush=True)
{touch}
print("survived")
"""


@pytest.fixture
def pages(pool: CpuPool) -> Iterator[PhysicalPages]:
    pages = PhysicalPages(pool.address)
    pages.grant([PageRun(0, PAGES)])
    yield pages
    pages.close()


def access(*addresses: int) -> list[str]:
    """The permissions of addresses, as /proc/self/maps prints them: `rw-s`, `---p`."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [tuple(int(end, 16) for end in span.split("-")) for span, *_ in lines]
    found = (bisect_right(spans, (address, 1 << 64)) - 1 for address in addresses)
    return [lines[k][1] if address < spans[k][1] else "gone" for address, k in zip(addresses, found, strict=True)]


def cell(space: CpuRange, offset_pages: int, byte: int = 0) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(space.base + offset_pages * PAGE_BYTES + byte)


def as_runs(pages: list[int]) -> list[PageRun]:
    """In this order, adjacent ones together."""
    runs: list[PageRun] = []
    for page in pages:
        if runs and runs[-1].stop == page:
            runs[-1] = PageRun(runs[-1].start, page + 1)
        else:
            runs.append(PageRun(page, page + 1))
    return runs


class TwoProcesses(RuleBasedStateMachine):
    """Two views of one pool, with two ranges each, beside a model of what is where and what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = CpuPool(PAGES * PAGE_BYTES, ahead_pages=1)
        self.views = [PhysicalPages(self.pool.address) for _ in range(2)]
        self.ranges = [CpuRange(SLOTS * PAGE_BYTES, view) for view in self.views for _ in range(2)]
        self.owner: dict[int, int] = {}  # page → view
        self.places: dict[tuple[int, int], int] = {}  # (range, offset) → page
        self.written = dict.fromkeys(range(PAGES), 0)
        self.turn = 0

    def loose(self, view: int) -> list[int]:
        return [page for page in range(PAGES) if self.owner.get(page) == view and page not in self.places.values()]

    @rule(data=st.data(), view=st.integers(0, 1))
    @precondition(lambda self: len(self.owner) < PAGES)
    def grant(self, data: st.DataObject, view: int) -> None:
        free = [page for page in range(PAGES) if page not in self.owner]
        chosen = data.draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
        self.views[view].grant(as_runs(chosen))
        self.owner.update(dict.fromkeys(chosen, view))

    @rule(data=st.data(), view=st.integers(0, 1), wiped=st.booleans())
    @precondition(lambda self: self.loose(0) and self.loose(1))
    def revoke(self, data: st.DataObject, view: int, wiped: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.loose(view)), min_size=1, unique=True))
        runs = as_runs(chosen)
        if wiped:
            self.views[view].start_wiping(runs)
            for run in runs:
                self.views[view].wipe(*run)
            self.written.update(dict.fromkeys(chosen, 0))
        self.views[view].revoke(runs)
        for page in chosen:
            del self.owner[page]

    @rule(data=st.data())
    def wipe_what_is_nobodys(self, data: st.DataObject) -> None:
        runs = as_runs([page for page in range(PAGES) if page not in self.owner])
        self.pool.wipe(runs)
        self.written.update({page: 0 for run in runs for page in range(*run)})

    @rule(data=st.data(), which=st.integers(0, 3), offset=st.integers(0, SLOTS - 1))
    def map(self, data: st.DataObject, which: int, offset: int) -> None:
        room = next((k for k in range(SLOTS - offset) if (which, offset + k) in self.places), SLOTS - offset)
        loose = self.loose(which // 2)
        if not room or not loose:
            return
        chosen = data.draw(st.permutations(loose))[:room]
        self.ranges[which].map(offset, as_runs(chosen))
        self.turn += 1
        for k, page in enumerate(chosen):
            self.places[which, offset + k] = page
            last = cell(self.ranges[which], offset + k, PAGE_BYTES - 8)
            assert last.value == self.written[page]
            last.value = self.written[page] = self.turn * PAGES + page

    @rule(data=st.data())
    @precondition(lambda self: self.places)
    def unmap(self, data: st.DataObject) -> None:
        which, offset = data.draw(st.sampled_from(sorted(self.places)))
        longest = next(n for n in range(1, SLOTS + 1) if (which, offset + n) not in self.places)
        count = data.draw(st.integers(1, longest))
        self.ranges[which].unmap(offset, count)
        for k in range(offset, offset + count):
            del self.places[which, k]

    @invariant()
    def contents_are_where_their_pages_are(self) -> None:
        for (which, offset), page in self.places.items():
            assert cell(self.ranges[which], offset, PAGE_BYTES - 8).value == self.written[page]

    @invariant()
    def only_mapped_addresses_have_access(self) -> None:
        places = [(which, offset) for which in range(4) for offset in range(SLOTS)]
        found = access(*(self.ranges[which].base + offset * PAGE_BYTES for which, offset in places))
        assert found == ["rw-s" if place in self.places else "---p" for place in places]

    def teardown(self) -> None:
        for space in self.ranges:
            space.close()
        for view in self.views:
            view.close()
        self.pool.close()


TestTwoProcesses = TwoProcesses.TestCase
TestTwoProcesses.settings = settings(max_examples=25, stateful_step_count=25)


@pytest.mark.parametrize("carries", [True, False])
def test_the_laws_hold_where_the_kernel_carries_no_page_tables(
    carries: bool, monkeypatch: pytest.MonkeyPatch, pages: PhysicalPages
) -> None:
    if not carries:
        monkeypatch.setattr(cpu_pages, "carry", lambda *_: False)
    space = CpuRange(4 * PAGE_BYTES, pages)
    space.map(0, [PageRun(3, 5), PageRun(1, 2)])
    for offset in range(3):
        cell(space, offset).value = offset + 1
    space.unmap(0, 3)
    assert access(space.base) == ["---p"]
    space.map(1, [PageRun(1, 2), PageRun(3, 5)])
    assert [cell(space, offset).value for offset in (1, 2, 3)] == [3, 1, 2]
    space.close()


@pytest.mark.parametrize(
    "touch",
    [
        "ctypes.memset(space.base + (2 << 20), 1, 1)",
        "ctypes.string_at(space.base + (7 << 20), 1)",
        "ctypes.string_at(home + 3 * (2 << 20), 1)",
        "space.unmap(0, 1); device.revoke([PageRun(1, 2)]); ctypes.string_at(home + (2 << 20), 1)",
    ],
    ids=["unmapped", "never mapped", "home, not granted", "home, revoked"],
)
def test_touching_what_is_out_of_reach_crashes(touch: str) -> None:
    code = TOUCH.format(touch=touch)
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert result.returncode == -signal.SIGSEGV
    assert result.stdout == "alive\n"


def test_the_copy_loop_never_faults_on_a_mapped_page(pages: PhysicalPages) -> None:
    space = CpuRange(PAGES * PAGE_BYTES, pages)
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [3, 1, 4, 0, 5, 2, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]):
        space.map(0, as_runs(order))
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        ctypes.memset(space.base, 1, PAGES * PAGE_BYTES)
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < PAGES
        space.unmap(0, PAGES)
    space.close()


def test_reserving_a_tebibyte_takes_no_memory_and_works_at_its_end(pool: CpuPool, device: CpuDevice) -> None:
    space = device.reserve(1 << 40)
    assert space.nbytes == 1 << 40
    last = (1 << 40) // PAGE_BYTES - 1
    space.map(last, [PageRun(0, 1)])
    cell(space, last, PAGE_BYTES - 8).value = 7
    assert access(space.base + (1 << 40) - PAGE_BYTES - 1) == ["---p"]
    assert pool.taken_bytes <= (pool.page_count + 1) * PAGE_BYTES


def test_sizes_are_rounded_up_to_pages(device: CpuDevice) -> None:
    assert device.reserve(1).nbytes == PAGE_BYTES
    assert device.reserve(PAGE_BYTES + 1).nbytes == 2 * PAGE_BYTES
    assert device.reserve(5).base % PAGE_BYTES == 0


def test_misuse_is_a_bug(pages: PhysicalPages) -> None:
    a, b = (CpuRange(4 * PAGE_BYTES, pages) for _ in range(2))
    a.map(0, [PageRun(1, 3)])
    with pytest.raises(AssertionError, match="page 2 is mapped already"):
        b.map(0, [PageRun(2, 3)])  # a page in two places
    for offset, run in ((1, PageRun(3, 4)), (0, PageRun(3, 4))):
        with pytest.raises(AssertionError, match="there are pages mapped already"):
            a.map(offset, [run])  # a place with two pages
    with pytest.raises(AssertionError, match="no pages"):
        a.map(2, [PageRun(PAGES * 2, PAGES * 2 + 1)])
    for offset in (-1, 3):
        with pytest.raises(AssertionError, match="beyond the range"):
            a.map(offset, [PageRun(3, 5)])
    for offset, count in ((2, 1), (1, 2), (3, 1)):
        with pytest.raises(AssertionError, match="no page at"):
            a.unmap(offset, count)
    a.close()
    b.close()


def test_closing_a_range_frees_its_pages_for_others(pages: PhysicalPages) -> None:
    a, b = (CpuRange(4 * PAGE_BYTES, pages) for _ in range(2))
    a.map(0, [PageRun(0, 2)])
    a.map(3, [PageRun(6, 7)])
    cell(a, 3).value = 6
    a.close()
    a.close()
    b.map(0, [PageRun(6, 7), PageRun(0, 1)])
    assert cell(b, 0).value == 6
    b.close()
