"""The streams of a simulated instance."""

from __future__ import annotations

from aegis.core.effects import CopyBlocks, LoadWeights, StreamName, WipePages
from aegis.core.events import Progress
from aegis.core.ids import ModelId, PageRun
from aegis.core.request import EventHandle
from aegis.sim.copies import Copy, Streams
from aegis.sim.faults.pretended import make_shape
from aegis.sim.flows import Bus, Link
from aegis.sim.heap import Heap
from aegis.sim.words import Words

SHAPE = make_shape(1 << 10)
PEER_WORD = 9


class Stand:
    """A link of a byte per nanosecond each way. `ended` are the copies that have, with their times."""

    def __init__(self) -> None:
        self.heap, self.words = Heap(), Words()
        bus = Bus(self.heap, 0)
        self.ended: list[tuple[StreamName, int]] = []
        self.streams = Streams(self.words, to_device=Link(bus, 10**9), to_host=Link(bus, 10**9), done=self._ended)

    def load(self, value: int, nbytes: int) -> EventHandle:
        event = EventHandle(0, value)
        self.streams.load(LoadWeights(StreamName.WEIGHTS, ModelId("m0"), event), nbytes)
        return event

    def swap_in(self, value: int, blocks: int, after: EventHandle | None = None) -> None:
        event = EventHandle(1, value)
        self.streams.copy(CopyBlocks(StreamName.SWAP_IN, SHAPE, ((0, 0, blocks),), after, event))

    def _ended(self, copy: Copy) -> None:
        self.ended.append((copy.stream, self.heap.now_ns))


def test_a_stream_copies_in_order_and_says_how_far_it_is() -> None:
    stand = Stand()
    first, second = stand.load(1, 500), stand.load(2, 300)
    stand.heap.run(until_ns=501)
    assert stand.words.passed(first) and not stand.words.passed(second)
    assert stand.streams.progress() == [Progress(StreamName.WEIGHTS, 1)]
    assert stand.streams.progress() == [] and stand.streams.in_flight
    stand.heap.run()
    assert stand.ended == [(StreamName.WEIGHTS, 500), (StreamName.WEIGHTS, 800)]


def test_what_has_not_been_told_is_in_flight() -> None:
    stand = Stand()
    stand.streams.wipe(WipePages((PageRun(0, 3),), EventHandle(4, 1)))
    stand.heap.run()
    assert stand.streams.in_flight
    assert stand.streams.progress() == [Progress(StreamName.SCRUB, 1)]
    assert not stand.streams.in_flight


def test_a_copy_begins_when_what_it_waits_for_has_passed() -> None:
    stand = Stand()
    peer = EventHandle(PEER_WORD, 5)
    stand.swap_in(1, 2, after=peer)
    stand.heap.at(100, stand.words.signal, peer)
    stand.heap.run()
    assert stand.ended == [(StreamName.SWAP_IN, 100 + 2 * SHAPE.block_bytes)]


def test_streams_share_the_link() -> None:
    stand = Stand()
    stand.load(1, 2 * SHAPE.block_bytes)
    stand.swap_in(1, 1)
    stand.heap.run()
    assert stand.ended == [
        (StreamName.SWAP_IN, 2 * SHAPE.block_bytes),
        (StreamName.WEIGHTS, 3 * SHAPE.block_bytes),
    ]


def test_what_is_left_of_an_abandoned_copy_is_not_copied() -> None:
    stand = Stand()
    first, second = stand.load(1, 1000), stand.load(2, 1000)
    stand.heap.at(100, stand.streams.abandon, first)
    stand.heap.at(150, stand.streams.abandon, second)
    stand.heap.run()
    assert stand.ended == [(StreamName.WEIGHTS, 100), (StreamName.WEIGHTS, 150)]
