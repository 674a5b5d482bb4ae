"""Laws of streams: work on one stream is done in order, and nothing after a wait starts before its event has passed."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import CpuPool
from aegis.device.host_memory import SharedMemory
from aegis.device.shared_events import SharedWords

LONG_NS = 60_000_000_000

# Once word 0 says that the first half has been written, copies it to the second half and tells on word 1.
PEER = """
import sys
from aegis.core.request import EventHandle
from aegis.device.cpu.device import CpuDevice
from aegis.device.shared_events import SharedWords
device = CpuDevice(sys.argv[1], SharedWords.open(sys.argv[2]), stream_words=[1])
region = device.open_host(sys.argv[3], writable=True)
stream = device.stream("peer")
stream.wait(EventHandle(0, 1))
half = region.nbytes // 2
event = stream.copy([(region.base + half, region.base, half)])
print("waiting", flush=True)
device.wait(event, timeout_ns=60_000_000_000)
"""


def buffer(nbytes: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    memory = ctypes.create_string_buffer(nbytes)
    return memory, ctypes.addressof(memory)


def test_values_count_the_copies_from_one(device: CpuDevice) -> None:
    stream = device.stream("s")
    assert stream.completed() == 0
    events = [stream.copy([]) for _ in range(5)]
    assert events == [EventHandle(stream.word, value) for value in (1, 2, 3, 4, 5)]
    assert device.wait(events[-1], timeout_ns=LONG_NS)
    assert stream.completed() == 5
    assert all(device.passed(event) for event in events)
    assert not device.passed(EventHandle(stream.word, 6))


def test_every_stream_has_a_word_of_its_own(device: CpuDevice) -> None:
    words = [device.stream(f"{k}").word for k in range(4)]
    assert words == [0, 1, 2, 3]


@pytest.mark.parametrize("nbytes", [0, 1, 4097, (128 << 10) - 1, 128 << 10, (64 << 20) + 3])
def test_copies_of_all_sizes_are_exact(device: CpuDevice, nbytes: int) -> None:
    (source, source_at), (target, target_at) = buffer(nbytes + 2), buffer(nbytes + 2)
    source.raw = random.Random(nbytes).randbytes(nbytes + 2)
    event = device.stream("s").copy([(target_at + 1, source_at + 1, nbytes)])
    assert device.wait(event, timeout_ns=LONG_NS)
    assert target.raw == b"\0" + source.raw[1 : nbytes + 1] + b"\0"


CELLS, CELL_BYTES = 6, 4096


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, CELLS - 1), st.integers(0, CELLS - 1), st.booleans()), max_size=40
    )
)
def test_streams_ordered_by_events_do_what_one_thread_would(program: list[tuple[int, int, int, bool]]) -> None:
    """Each copy waits for the last ones that read or wrote its cells; the outcome is that of doing all in sequence."""
    words, pool = SharedWords.create(3), CpuPool(2 << 20, ahead_pages=0)
    device = CpuDevice(pool.address, words)
    streams = [device.stream(f"{k}") for k in range(3)]
    _memory, base = buffer(CELLS * CELL_BYTES)
    expected = list(range(1, CELLS + 1))
    for k, value in enumerate(expected):
        ctypes.memset(base + k * CELL_BYTES, value, CELL_BYTES)
    users: list[list[EventHandle]] = [[] for _ in range(CELLS)]
    for which, target, source, in_pieces in program:
        if target == source:
            continue
        for event in {*users[target], *users[source]}:
            streams[which].wait(event)
        pieces = 4 if in_pieces else 1
        size = CELL_BYTES // pieces
        copies = [
            (base + target * CELL_BYTES + p * size, base + source * CELL_BYTES + p * size, size) for p in range(pieces)
        ]
        event = streams[which].copy(copies)
        users[target].append(event)
        users[source].append(event)
        expected[target] = expected[source]
    for stream in streams:
        assert device.wait(stream.copy([]), timeout_ns=LONG_NS)
    for k, value in enumerate(expected):
        assert ctypes.string_at(base + k * CELL_BYTES, CELL_BYTES) == bytes([value]) * CELL_BYTES
    device.close()
    pool.close()
    words.close()


def test_nothing_after_a_wait_starts_before_the_event(device: CpuDevice, words: SharedWords) -> None:
    (_source, source), (target, target_at) = buffer(1), buffer(1)
    stream = device.stream("s")
    before = stream.copy([])
    stream.wait(EventHandle(15, 7))
    after = stream.copy([(target_at, source, 1)])
    target.raw = b"x"
    assert device.wait(before, timeout_ns=LONG_NS)
    words.store(15, 6)
    assert not device.wait(after, timeout_ns=1_000_000)
    assert target.raw == b"x"
    words.store(15, 7)
    assert device.wait(after, timeout_ns=LONG_NS)
    assert target.raw == b"\0"


def test_a_failed_copy_breaks_the_stream(device: CpuDevice) -> None:
    (_source, source), (target, target_at) = buffer(8), buffer(8)
    target.raw = b"unharmed"
    stream, other = device.stream("bad"), device.stream("good")
    assert device.wait(stream.copy([]), timeout_ns=LONG_NS)
    stream.copy([(target_at, source, -1)])
    after = stream.copy([(target_at, source, 8)])
    stream._thread.join()
    with pytest.raises(RuntimeError, match="stream bad failed: a copy of -1 bytes"):
        stream.completed()
    assert not device.passed(after)
    assert target.raw == b"unharmed"
    assert device.wait(other.copy([]), timeout_ns=LONG_NS)


def test_a_stream_waits_for_another_process_and_it_for_ours(
    pool: CpuPool, device: CpuDevice, words: SharedWords
) -> None:
    half = 4 << 20
    memory = SharedMemory.create(2 * half, "both")
    region = device.open_host(memory.path, writable=True)
    filling, answer = device.stream("filling"), EventHandle(1, 1)
    contents, contents_at = buffer(half)
    contents.raw = random.Random(1).randbytes(half)
    back, back_at = buffer(half)
    command = [sys.executable, "-c", PEER, pool.address, words.path, memory.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"waiting\n"
        assert not device.passed(answer)
        filling.copy([(region.base, contents_at, half)])
        filling.wait(answer)
        assert device.wait(filling.copy([(back_at, region.base + half, half)]), timeout_ns=LONG_NS)
    assert peer.returncode == 0
    assert back.raw == contents.raw
    memory.close()


def test_poison_releases_what_waits_for_a_dead_process(pool: CpuPool, device: CpuDevice, words: SharedWords) -> None:
    memory = SharedMemory.create(2 << 20, "both")
    stream = device.stream("waiting")
    command = [sys.executable, "-c", PEER, pool.address, words.path, memory.path]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert peer.stdout is not None
    assert peer.stdout.readline() == b"waiting\n"
    stream.wait(EventHandle(1, 1))
    after = stream.copy([])
    peer.send_signal(signal.SIGKILL)
    peer.communicate()
    assert not device.passed(after)
    words.poison(1)
    assert device.wait(after, timeout_ns=LONG_NS)
    memory.close()


def test_a_used_word_cannot_be_a_streams(device: CpuDevice, words: SharedWords) -> None:
    words.store(0, 1)
    with pytest.raises(AssertionError, match="used before"):
        device.stream("s")


@pytest.mark.parametrize("blocked", [True, False])
def test_closing_ends_the_threads_whatever_they_do(pool: CpuPool, words: SharedWords, blocked: bool) -> None:
    device = CpuDevice(pool.address, words)
    (_source, source), (_target, target) = buffer(1 << 20), buffer(1 << 20)
    stream = device.stream("closing")
    if blocked:
        stream.wait(EventHandle(15, 1))
    for _ in range(1000):
        stream.copy([(target, source, 1 << 20)])
    device.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "stream closing"]
    assert words.load(stream.word) < 1000


def test_an_abandoned_copy_is_not_done_and_its_event_passes(device: CpuDevice, words: SharedWords) -> None:
    (_source, source), (target, target_at) = buffer(8), buffer(8)
    stream = device.stream("s")
    done = stream.copy([(target_at, source, 1)])
    assert device.wait(done, timeout_ns=LONG_NS)
    target.raw = b"unharmed"
    stream.wait(EventHandle(15, 1))
    unwanted = stream.copy([(target_at, source, 4)])
    wanted = stream.copy([(target_at + 6, source, 2)])
    stream.abandon(unwanted)
    stream.abandon(done)  # too late, and no harm
    words.store(15, 1)
    assert device.wait(wanted, timeout_ns=LONG_NS)
    assert device.passed(unwanted)
    assert target.raw == b"unharm\0\0"


def test_a_copy_is_abandoned_in_the_middle(device: CpuDevice) -> None:
    """Of many pieces, those that remain after the first has arrived are not copied; unless they arrived before we could
    say so, and then it is tried again."""
    piece = ctypes.create_string_buffer(b"x" * (1 << 17), 1 << 17)
    target, target_at = buffer(1000 << 17)
    stream = device.stream("s")
    target[len(target) - 1] = b"x"
    while target[len(target) - 1] == b"x":
        ctypes.memset(target_at, 0, len(target))
        event = stream.copy([(target_at + (k << 17), ctypes.addressof(piece), 1 << 17) for k in range(1000)])
        while target[0] == b"\0":
            os.sched_yield()
        stream.abandon(event)
        assert device.wait(event, timeout_ns=LONG_NS)


def test_wiped_pages_are_zeros_and_no_other_is_touched(device: CpuDevice) -> None:
    space = device.reserve(device.page_count << 21)
    everything = [PageRun(0, device.page_count)]
    space.map(0, everything)
    ctypes.memset(space.base, 1, space.nbytes)
    space.unmap(0, device.page_count)
    event = device.stream("scrub").wipe([PageRun(0, 10), PageRun(12, 13)])
    assert device.wait(event, timeout_ns=LONG_NS)
    space.map(0, everything)
    zeros = [page for page in range(device.page_count) if not any(ctypes.string_at(space.base + (page << 21), 1 << 21))]
    assert zeros == [*range(10), 12]


def test_a_wipe_waits_its_turn_and_keeps_its_pages_until_then(device: CpuDevice, words: SharedWords) -> None:
    stream = device.stream("scrub")
    stream.wait(EventHandle(15, 1))
    event = stream.wipe([PageRun(3, 4)])
    with pytest.raises(AssertionError, match="page 3 is being wiped"):
        device.revoke([PageRun(2, 4)])
    words.store(15, 1)
    assert device.wait(event, timeout_ns=LONG_NS)
    device.revoke([PageRun(2, 4)])
