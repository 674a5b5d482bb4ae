"""Laws of the CUDA device's pages and ranges, over a model of the driver."""

from __future__ import annotations

import ctypes
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aegis.core.ids import PageRun
from aegis.device.cuda.driver import CudaError
from aegis.device.cuda.handle_sharing import BATCH
from aegis.device.shared_events import SharedWords
from tests.unit.device.cuda_parts import PAGE, Rig

TOUCH = """
import ctypes, sys
from aegis.core.ids import PageRun
from aegis.device.shared_events import SharedWords
from tests.unit.device.cuda_parts import PAGE, Rig
rig = Rig(SharedWords.create(4))
space = rig.open(granted=[PageRun(0, 4)]).reserve(8 * PAGE)
space.map(2, [PageRun(0, 2)])
ctypes.memset(space.base + 2 * PAGE, 1, 2 * PAGE)
if sys.argv[1] == "unmapped":
    space.unmap(3, 1)
print("touching", flush=True)
ctypes.memset(space.base + 3 * PAGE, 1, 1)
print("touched", flush=True)
"""


@pytest.fixture
def rig(words: SharedWords) -> Iterator[Rig]:
    rig = Rig(words)
    yield rig
    rig.close()


def fill(address: int, page: int) -> None:
    ctypes.memset(address, page + 1, PAGE)


def shows(address: int, page: int) -> bool:
    return ctypes.string_at(address, PAGE) == bytes([page + 1]) * PAGE


def test_pages_appear_where_they_are_mapped_and_keep_their_bytes(rig: Rig) -> None:
    device = rig.open(granted=[PageRun(0, 16)])
    a, b = device.reserve(10 * PAGE), device.reserve(10 * PAGE)
    a.map(1, [PageRun(4, 7), PageRun(0, 2)])
    for at, page in enumerate([4, 5, 6, 0, 1], 1):
        fill(a.base + at * PAGE, page)
    a.unmap(2, 3)  # pages 5, 6, 0
    b.map(0, [PageRun(0, 1), PageRun(5, 7)])
    assert [shows(b.base + at * PAGE, page) for at, page in enumerate([0, 5, 6])] == [True] * 3
    assert shows(a.base + PAGE, 4) and shows(a.base + 5 * PAGE, 1)


def test_a_row_of_pages_takes_one_call_for_access_and_one_to_unmap(rig: Rig) -> None:
    device, calls = rig.open(granted=[PageRun(0, 16)]), rig.models[0].calls
    space = device.reserve(16 * PAGE)
    space.map(0, [PageRun(8, 16), PageRun(0, 8)])
    space.unmap(4, 8)
    assert (calls["cuMemMap"], calls["cuMemSetAccess"], calls["cuMemUnmap"]) == (16, 1, 1)


@pytest.mark.parametrize("how", ["mapped", "unmapped"])
def test_touching_an_unmapped_page_crashes(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", TOUCH, how], capture_output=True, text=True)
    if how == "mapped":
        assert (done.returncode, done.stdout) == (0, "touching\ntouched\n")
    else:
        assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "touching\n")


@pytest.mark.parametrize(("call", "failures"), [("cuMemMap", 1), ("cuMemSetAccess", 1)])
def test_a_refused_mapping_leaves_nothing_mapped(rig: Rig, call: str, failures: int) -> None:
    device = rig.open(granted=[PageRun(0, 4)])
    space = device.reserve(4 * PAGE)
    space.map(0, [PageRun(0, 1)])
    rig.models[0].failing[call] = failures
    with pytest.raises(CudaError, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        space.map(1, [PageRun(1, 4)])
    assert len(rig.models[0].mappings) == 1
    space.map(1, [PageRun(1, 4)])
    assert len(rig.models[0].mappings) == 4


def test_only_granted_pages_can_be_mapped(rig: Rig) -> None:
    device = rig.open(granted=[PageRun(0, 4)])
    space = device.reserve(4 * PAGE)
    with pytest.raises(AssertionError, match="not granted"):
        space.map(0, [PageRun(3, 5)])
    device.revoke([PageRun(2, 4)])
    with pytest.raises(AssertionError, match="not granted"):
        space.map(0, [PageRun(2, 3)])


def test_a_page_is_at_one_place_at_a_time_and_cannot_be_revoked_from_there(rig: Rig) -> None:
    device = rig.open(granted=[PageRun(0, 4)])
    a, b = device.reserve(4 * PAGE), device.reserve(4 * PAGE)
    a.map(0, [PageRun(0, 2)])
    with pytest.raises(AssertionError, match="page 1 is mapped already"):
        b.map(0, [PageRun(1, 3)])
    with pytest.raises(AssertionError, match="page 1 is mapped"):
        device.revoke([PageRun(1, 2)])


def test_more_pages_than_one_message_carries(words: SharedWords) -> None:
    count = 2 * BATCH + 3
    rig = Rig(words, pages=count)
    device = rig.open(granted=[PageRun(0, count)])
    space = device.reserve(count * PAGE)
    space.map(0, [PageRun(0, count)])
    assert len(rig.models[0].mappings) == count
    rig.close()


def test_granting_again_what_was_revoked_gives_the_same_page(rig: Rig) -> None:
    device = rig.open(granted=[PageRun(0, 8)])
    space = device.reserve(8 * PAGE)
    space.map(0, [PageRun(0, 8)])
    for page in range(8):
        fill(space.base + page * PAGE, page)
    space.unmap(0, 8)
    for _ in range(20):
        device.revoke([PageRun(2, 5)])
        device.grant([PageRun(2, 5)])
    space.map(0, [PageRun(2, 5)])
    assert [shows(space.base + at * PAGE, at + 2) for at in range(3)] == [True] * 3


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(5, 40))
def test_two_devices_hand_pages_to_and_fro(draws: random.Random, steps: int) -> None:
    """Each page shows what was last written to it, wherever it is mapped and whoever wrote it."""
    words = SharedWords.create(4)
    rig = Rig(words, pages=6)
    try:  # a draw may end the example
        _hand_to_and_fro(rig, draws, steps)
    finally:
        rig.close()
        words.close()


def _hand_to_and_fro(rig: Rig, draws: random.Random, steps: int) -> None:
    devices = [rig.open(granted=[PageRun(0, 3)]), rig.open(granted=[PageRun(3, 6)])]
    spaces = [device.reserve(12 * PAGE) for device in devices]
    owner = [0, 0, 0, 1, 1, 1]
    placed: dict[int, int] = {}
    stamps = dict.fromkeys(range(6), 0)
    for stamp in range(1, steps):
        page = draws.randrange(6)
        who = owner[page]
        space, run = spaces[who], [PageRun(page, page + 1)]
        if page not in placed:
            if draws.random() < 0.4:
                devices[who].revoke(run)
                devices[1 - who].grant(run)
                owner[page] = 1 - who
            else:
                taken = {at for other, at in placed.items() if owner[other] == who}
                placed[page] = draws.choice([at for at in range(12) if at not in taken])
                space.map(placed[page], run)
                cell = ctypes.c_uint64.from_address(space.base + placed[page] * PAGE + 512)
                assert cell.value == stamps[page]
                cell.value = stamps[page] = stamp
        else:
            space.unmap(placed.pop(page), 1)
