"""Laws of the CUDA device's streams, over a model of the driver: as for the CPU's, and that they feed in chunks."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.cuda import streams as cuda_streams
from aegis.device.cuda.device import CudaDevice
from aegis.device.shared_events import SharedWords
from tests.unit.device.cuda_parts import LONG_NS, PAGE, Rig

CELLS, CELL_BYTES = 6, 4096


@pytest.fixture
def rig(words: SharedWords) -> Iterator[Rig]:
    rig = Rig(words)
    yield rig
    rig.close()


@pytest.fixture
def device(rig: Rig) -> CudaDevice:
    return rig.open()


def buffer(nbytes: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    memory = ctypes.create_string_buffer(nbytes)
    return memory, ctypes.addressof(memory)


def test_values_count_the_copies_from_one(device: CudaDevice) -> None:
    stream = device.stream("s")
    assert stream.completed() == 0
    events = [stream.copy([]) for _ in range(5)]
    assert events == [EventHandle(stream.word, value) for value in (1, 2, 3, 4, 5)]
    assert device.wait(events[-1], timeout_ns=LONG_NS)
    assert stream.completed() == 5
    assert all(device.passed(event) for event in events)
    assert not device.passed(EventHandle(stream.word, 6))


def test_each_copy_is_timed_once_and_only_when_it_has_ended(device: CudaDevice) -> None:
    stream = device.stream("s")
    assert stream.took() == []
    began_ns = time.monotonic_ns()
    events = [stream.copy([]) for _ in range(3)]
    assert device.wait(events[-1], timeout_ns=LONG_NS)
    taken = stream.took()
    assert [took.value for took in taken] == [1, 2, 3]
    assert all(began_ns <= took.start_ns <= took.stop_ns <= time.monotonic_ns() for took in taken)
    assert stream.took() == []


@pytest.mark.parametrize("nbytes", [0, 1, 4097, cuda_streams.CHUNK_BYTES, (64 << 20) + 3])
def test_copies_of_all_sizes_are_exact(device: CudaDevice, nbytes: int) -> None:
    (source, source_at), (target, target_at) = buffer(nbytes + 2), buffer(nbytes + 2)
    source.raw = random.Random(nbytes).randbytes(nbytes + 2)
    event = device.stream("s").copy([(target_at + 1, source_at + 1, nbytes)])
    assert device.wait(event, timeout_ns=LONG_NS)
    assert target.raw == b"\0" + source.raw[1 : nbytes + 1] + b"\0"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, CELLS - 1), st.integers(0, CELLS - 1), st.booleans()), max_size=40
    )
)
def test_streams_ordered_by_events_do_what_one_thread_would(program: list[tuple[int, int, int, bool]]) -> None:
    """Each copy waits for the last ones that read or wrote its cells; the outcome is that of doing all in sequence.
    Two of the streams belong to one process, the third to another."""
    words = SharedWords.create(3)
    rig = Rig(words, pages=1)
    one, other = rig.open(stream_words=[0, 1]), rig.open(stream_words=[2])
    streams = [one.stream("0"), one.stream("1"), other.stream("2")]
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
        assert one.wait(stream.copy([]), timeout_ns=LONG_NS)
    for k, value in enumerate(expected):
        assert ctypes.string_at(base + k * CELL_BYTES, CELL_BYTES) == bytes([value]) * CELL_BYTES
    rig.close()
    words.close()


def test_nothing_after_a_wait_starts_before_the_event(device: CudaDevice, words: SharedWords) -> None:
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
    words.poison(15)
    assert device.wait(after, timeout_ns=LONG_NS)
    assert target.raw == b"\0"


def test_a_stream_may_wait_for_what_its_sibling_has_not_been_given_yet(device: CudaDevice, words: SharedWords) -> None:
    (_source, source), (target, target_at) = buffer(1), buffer(1)
    first, second = device.stream("first"), device.stream("second")
    first.wait(EventHandle(15, 1))
    second.wait(first.copy([]))
    after = second.copy([(target_at, source, 1)])
    target.raw = b"x"
    assert not device.wait(after, timeout_ns=1_000_000)
    assert target.raw == b"x"
    words.store(15, 1)
    assert device.wait(after, timeout_ns=LONG_NS)


_BROKEN: list[object] = []  # for as long as threads of theirs may run


def test_a_failed_copy_breaks_the_stream(rig: Rig, device: CudaDevice) -> None:
    """Device memory that is not mapped: an error on the GPU, noticed later."""
    space = device.reserve(PAGE)
    (kept, source), (target, target_at) = buffer(8), buffer(8)
    target.raw = b"unharmed"
    stream = device.stream("bad")
    assert device.wait(stream.copy([]), timeout_ns=LONG_NS)
    stream.copy([(space.base, source, 8)])
    after = stream.copy([(target_at, source, 8)])
    with pytest.raises(RuntimeError, match=r"stream bad failed: .*CUDA_ERROR_ILLEGAL_ADDRESS"):
        while True:
            stream.completed()
    assert not device.passed(after)
    assert target.raw == b"unharmed"
    stream.end()  # what is broken cannot be closed in order, and may still touch what it was given
    rig.models[0].streams.clear()
    rig.devices.remove(device)
    _BROKEN.extend((device, kept, target))


def test_wiped_pages_are_zeros_and_out_of_the_way(rig: Rig, device: CudaDevice) -> None:
    device.grant([PageRun(0, 16)])
    space = device.reserve(16 * PAGE)
    space.map(0, [PageRun(0, 16)])
    ctypes.memset(space.base, 5, 16 * PAGE)
    space.unmap(2, 9)
    event = device.stream("scrub").wipe([PageRun(9, 11), PageRun(2, 4)])
    assert event.value == 1
    assert device.wait(event, timeout_ns=LONG_NS)
    space.map(2, [PageRun(2, 11)])
    wiped = [page for page in range(16) if ctypes.string_at(space.base + page * PAGE, PAGE) == bytes(PAGE)]
    assert wiped == [2, 3, 9, 10]


def test_the_gpu_is_given_a_few_chunks_ahead(device: CudaDevice, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """So an abandoned copy ends soon, and its event passes."""
    monkeypatch.setattr(cuda_streams, "CHUNK_BYTES", CELL_BYTES)
    monkeypatch.setattr(cuda_streams, "CHUNKS_AHEAD", 2)
    gate = threading.Event()
    memory, base = buffer(100 * CELL_BYTES)
    _source, source = buffer(100 * CELL_BYTES)
    stream, other = device.stream("weights"), device.stream("other")
    stream._handle.put(lambda: gate.wait(60) and None)
    memory.raw = b"x" * 100 * CELL_BYTES
    event = stream.copy([(base, source, 60 * CELL_BYTES), (base + 60 * CELL_BYTES, source, 40 * CELL_BYTES)])
    assert device.wait(other.copy([]), timeout_ns=LONG_NS)
    while len(stream._ahead) < 2:
        pass
    stream.abandon(event)
    gate.set()
    assert device.wait(event, timeout_ns=LONG_NS)
    assert len(rig.models[0].copied) <= 4
    assert memory.raw[4 * CELL_BYTES :] == b"x" * 96 * CELL_BYTES
    after = stream.copy([(base, source, 100 * CELL_BYTES)])
    assert device.wait(after, timeout_ns=LONG_NS)
    assert memory.raw == bytes(100 * CELL_BYTES)
    stream.abandon(after)
    assert not stream._abandoned


def test_of_a_copy_that_is_abandoned_when_the_gpu_has_all_of_it_nothing_is_kept(device: CudaDevice) -> None:
    gate = threading.Event()
    (_source, source), (_target, target) = buffer(CELL_BYTES), buffer(CELL_BYTES)
    stream = device.stream("weights")
    stream._handle.put(lambda: gate.wait(60) and None)
    event = stream.copy([(target, source, CELL_BYTES)])
    while stream._last_given < event.value:
        pass
    stream.abandon(event)
    gate.set()
    assert device.wait(event, timeout_ns=LONG_NS)
    assert not stream._abandoned


def test_events_are_used_again(rig: Rig, device: CudaDevice) -> None:
    stream = device.stream("s")
    for _ in range(50):
        assert device.wait(stream.copy([]), timeout_ns=LONG_NS)
    assert len(rig.models[0].events) <= 3


def test_a_used_word_cannot_be_a_streams(device: CudaDevice, words: SharedWords) -> None:
    words.store(0, 1)
    with pytest.raises(AssertionError, match="used before"):
        device.stream("s")


@pytest.mark.parametrize("blocked_by", ["another process", "a sibling", "nothing"])
def test_closing_ends_the_threads_whatever_they_do(words: SharedWords, blocked_by: str) -> None:
    rig = Rig(words)
    device = rig.open()
    (_source, source), (_target, target) = buffer(1 << 20), buffer(1 << 20)
    sibling, stream = device.stream("sibling"), device.stream("closing")
    if blocked_by == "another process":
        stream.wait(EventHandle(15, 1))
    elif blocked_by == "a sibling":
        stream.wait(EventHandle(sibling.word, 1))
    for _ in range(1000):
        stream.copy([(target, source, 1 << 20)])
    rig.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "stream closing"]
    assert words.load(stream.word) < 1000
