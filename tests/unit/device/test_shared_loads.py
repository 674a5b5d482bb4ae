"""Loads that peers carry parts of: their bytes, whoever carried them, and what a slow or lost peer does to them."""

from __future__ import annotations

import ctypes
import errno
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from aegis.core.ids import PageRun
from aegis.core.model import PEERS_MAX, PIECE_BYTES, STAGING_BYTES
from aegis.core.request import EventHandle
from aegis.device.cpu import peer_memory
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pages import AddressSpace
from aegis.device.cpu.pool import PAGE_BYTES, CpuPool
from aegis.device.host_memory import SharedMemory
from aegis.device.image_relay import piece_copies
from aegis.device.peer_transfers import PEER_STREAMS, PEER_WORDS, PeerTransfers
from aegis.device.piece_requests import over, piece_of, request_of
from aegis.device.protocol import HostRegion, VirtualRange
from aegis.device.shared_events import POISON, SharedWords

LONG_NS = 60_000_000_000
PIECES = 12
NBYTES = PIECES * PIECE_BYTES - 12345
PAGES = -(-NBYTES // PAGE_BYTES)
CUT = 3 * PIECE_BYTES + 4096
STAGING = (PageRun(0, 5), PageRun(7, 14))
WORDS = PEER_STREAMS + PEER_WORDS
assert sum(run.pages for run in STAGING) * PAGE_BYTES == STAGING_BYTES


@dataclass
class Side:
    """An instance on a device of its own: a target of loads and a peer of others."""

    words: SharedWords
    first_word: int
    pages: int
    image: SharedMemory
    pool: CpuPool = field(init=False)
    device: CpuDevice = field(init=False)
    peers: PeerTransfers = field(init=False)
    host: HostRegion = field(init=False)

    def __post_init__(self) -> None:
        words = range(self.first_word, self.first_word + WORDS)
        self.pool = CpuPool(self.pages * PAGE_BYTES, ahead_pages=0)
        self.device = CpuDevice(self.pool.address, self.words, stream_words=words[:PEER_STREAMS])
        self.device.grant([PageRun(0, self.pages)])
        self.peers = PeerTransfers(self.device, self.words, words[PEER_STREAMS:])
        self.host = self.device.open_host(self.image.path, writable=False)

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """The image lies in two parts, the second before the first."""
        return [(0, self.host.base + NBYTES - CUT, CUT), (CUT, self.host.base, NBYTES - CUT)]

    def stage(self, number: int, load: int, peer: int, target: Side) -> EventHandle:
        return self.peers.relay.stage(number, load, self.parts, target.peers.words.requests[peer], STAGING)

    def join(self, load: int, peer: int, other: Side) -> None:
        self.peers.loads.join(load, peer, other.pool.address, STAGING, other.peers.words.staged)

    def close(self) -> None:
        self.peers.close()
        self.device.close()
        self.pool.close()


@dataclass
class Stand:
    """A target, and peers, around an image."""

    words: SharedWords
    image: SharedMemory
    content: bytes
    target: Side
    peers: list[Side]
    space: VirtualRange
    writable: HostRegion

    def content_loaded(self) -> bytes:
        read = ctypes.string_at(self.space.base, NBYTES)
        return read[CUT:] + read[:CUT]


@pytest.fixture
def stand() -> Iterator[Stand]:
    words = SharedWords.create(4 * WORDS)
    image = SharedMemory.create(NBYTES, "image")
    content = random.Random(0).randbytes(NBYTES)
    target = Side(words, WORDS, PAGES, image)
    writable = target.device.open_host(image.path, writable=True)
    ctypes.memmove(writable.base, content, NBYTES)
    peers = [Side(words, (2 + at) * WORDS, 14, image) for at in range(2)]
    space = target.device.reserve(PAGES * PAGE_BYTES)
    space.map(0, [PageRun(0, PAGES)])
    yield Stand(words, image, content, target, peers, space, writable)
    for side in (target, *peers):
        side.close()
    image.close()
    words.close()


def hold_the_own_link(stand: Stand) -> Callable[[], None]:
    """Until it is called nothing comes over the target's own link."""
    stand.target.peers.loads._own.wait(EventHandle(0, 1))
    return lambda: stand.words.store(0, 1)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(0.001)


def test_requests_grow_with_the_load_the_count_and_nothing_else() -> None:
    first = [request_of(1, 0, 9), request_of(1, 1), request_of(1, 1, 5), request_of(1, 2, 0), over(1)]
    values = [*first, request_of(2, 0), over(2), POISON]
    assert values == sorted(values)
    assert piece_of(request_of(7, 3, 1234), 7) == 1234
    assert [piece_of(value, 1) for value in (over(1), request_of(2, 0, 4), POISON)] == [None] * 3


def test_however_many_loads_there_were_a_lost_process_wants_no_more() -> None:
    load = 1 << 30
    assert over(load) < POISON and piece_of(POISON, load) is None


def test_a_piece_is_what_lies_there_of_each_part() -> None:
    image = [(0, 1000, PIECE_BYTES + 1), (PIECE_BYTES + 1, 5, 100)]
    assert piece_copies(image, 0, 70) == [(70, 1000, PIECE_BYTES)]
    assert piece_copies(image, 1, 70) == [(70, 1000 + PIECE_BYTES, 1), (71, 5, 100)]


def test_without_peers_all_comes_over_the_own_link(stand: Stand) -> None:
    event = stand.target.peers.loads.load(1, stand.target.parts, stand.space.base)
    assert stand.target.device.wait(event, timeout_ns=LONG_NS)
    assert stand.content_loaded() == stand.content
    assert stand.target.peers.loads.carried_bytes == 0


def test_peers_carry_what_the_own_link_does_not(stand: Stand) -> None:
    target, loads = stand.target, stand.target.peers.loads
    release = hold_the_own_link(stand)
    event = loads.load(1, target.parts, stand.space.base)
    staged = [side.stage(1, 1, at, target) for at, side in enumerate(stand.peers)]
    for at, side in enumerate(stand.peers):
        target.join(1, at, side)
    until(lambda: loads.carried_bytes == NBYTES - PIECE_BYTES)  # the own link is about to reach the first piece
    assert not target.device.passed(event)
    first_at = NBYTES - CUT  # of the image's first piece: what peers brought is not read again
    ctypes.memset(stand.writable.base, 0xDD, first_at)
    ctypes.memset(stand.writable.base + first_at + PIECE_BYTES, 0xDD, CUT - PIECE_BYTES)
    release()
    assert target.device.wait(event, timeout_ns=LONG_NS)
    assert stand.content_loaded() == stand.content
    for side, each in zip(stand.peers, staged, strict=True):
        assert target.device.wait(each, timeout_ns=LONG_NS)
        assert stand.words.load(side.peers.words.staged) > 0
        side.peers.relay.unmap()
    target.peers.loads.settle()


@pytest.mark.long
def test_a_peer_that_stages_nothing_keeps_nobody(stand: Stand) -> None:
    loads = stand.target.peers.loads
    event = loads.load(1, stand.target.parts, stand.space.base)
    stand.target.join(1, 0, stand.peers[0])
    assert stand.target.device.wait(event, timeout_ns=LONG_NS)
    assert stand.content_loaded() == stand.content
    assert all(stand.words.load(word) == over(1) for of_peer in loads._requests for word in of_peer)


@pytest.mark.long
def test_who_comes_late_is_told_that_it_is_over(stand: Stand) -> None:
    target, peer = stand.target, stand.peers[0]
    assert target.device.wait(target.peers.loads.load(1, target.parts, stand.space.base), timeout_ns=LONG_NS)
    target.peers.loads.settle()
    event = peer.stage(1, 1, 0, target)
    target.join(1, 0, peer)
    assert target.device.wait(event, timeout_ns=LONG_NS)
    assert stand.words.load(peer.peers.words.staged) == 0


def test_what_a_lost_peer_left_is_not_taken_for_the_image(stand: Stand) -> None:
    """Its events have all passed, and others write to its pages."""
    target, loads, peer = stand.target, stand.target.peers.loads, stand.peers[0]
    release = hold_the_own_link(stand)
    event = loads.load(1, target.parts, stand.space.base)
    target.join(1, 0, peer)
    until(lambda: stand.words.load(loads._requests[0][0]) > 0)
    staging = peer.device.reserve(STAGING_BYTES)
    staging.map(0, STAGING)
    ctypes.memset(staging.base, 0xEE, STAGING_BYTES)
    stand.words.poison(peer.peers.words.staged)
    until(lambda: stand.words.load(loads._requests[0][0]) == over(1))
    release()
    assert target.device.wait(event, timeout_ns=LONG_NS)
    assert stand.content_loaded() == stand.content
    assert loads.carried_bytes == 0


def test_an_abandoned_load_is_over_soon_and_its_peers_are_free(stand: Stand) -> None:
    target, loads, peer = stand.target, stand.target.peers.loads, stand.peers[0]
    release = hold_the_own_link(stand)
    first = loads.load(1, target.parts, stand.space.base)
    second = loads.load(2, target.parts, stand.space.base)
    staged = peer.stage(1, 1, 0, target)
    loads.abandon(1)
    release()
    assert target.device.wait(first, timeout_ns=LONG_NS)
    assert target.device.wait(staged, timeout_ns=LONG_NS)
    assert target.device.wait(second, timeout_ns=LONG_NS)
    assert stand.content_loaded() == stand.content


@pytest.mark.long
def test_one_peer_serves_load_after_load(stand: Stand) -> None:
    target, loads, peer = stand.target, stand.target.peers.loads, stand.peers[0]
    for number in (1, 2, 3):
        ctypes.memset(stand.space.base, 0, NBYTES)
        at = (number - 1) % PEERS_MAX
        event = loads.load(number, target.parts, stand.space.base)
        staged = peer.stage(number, number, at, target)
        target.join(number, at, peer)
        assert target.device.wait(event, timeout_ns=LONG_NS)
        assert target.device.wait(staged, timeout_ns=LONG_NS)
        assert stand.content_loaded() == stand.content
        peer.peers.relay.unmap()
        loads.settle()
    assert not loads._loads


def test_a_pool_that_is_gone_cannot_be_opened(stand: Stand) -> None:
    assert stand.target.device.open_peer("/proc/self/fd/999999", STAGING) is None


def test_a_peers_pages_can_be_read_and_not_written(stand: Stand) -> None:
    peer = stand.peers[0]
    memory = stand.target.device.open_peer(peer.pool.address, STAGING)
    assert memory is not None and memory.nbytes == STAGING_BYTES
    space = peer.device.reserve(STAGING_BYTES)
    space.map(0, STAGING)
    ctypes.memset(space.base + 6 * PAGE_BYTES, 0x5A, PAGE_BYTES)
    assert ctypes.string_at(memory.base + 6 * PAGE_BYTES, PAGE_BYTES) == b"\x5a" * PAGE_BYTES
    line = next(line for line in open("/proc/self/maps") if line.startswith(f"{memory.base:x}-"))  # noqa: PTH123, SIM115
    assert line.split()[1] == "r--s"
    memory.close()
    memory.close()


def test_a_peers_pages_that_cannot_be_mapped_leave_no_addresses(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[AddressSpace] = []

    class Space(AddressSpace):
        def close(self) -> None:
            closed.append(self)
            super().close()

    def refuse(*_arguments: object, **_options: object) -> int:
        raise OSError(errno.ENOMEM, "mmap: Cannot allocate memory")

    monkeypatch.setattr(peer_memory, "AddressSpace", Space)
    monkeypatch.setattr(peer_memory, "map_file", refuse)
    assert stand.target.device.open_peer(stand.peers[0].pool.address, STAGING) is None
    assert len(closed) == 1
