"""The streams of a simulated instance."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.effects import CopyBlocks, LoadWeights, StreamName, WipePages
from aegis.core.events import Progress
from aegis.core.ids import ModelId, PageRun
from aegis.core.request import EventHandle
from aegis.sim.copies import Copy, Links, Streams
from aegis.sim.event_queue import EventQueue
from aegis.sim.faults.fake_models import make_shape
from aegis.sim.flows import Bus, Link
from aegis.sim.timeline_semaphores import TimelineSemaphores

SHAPE = make_shape(1 << 10)
BLOCK = SHAPE.block_bytes
PREFETCH = StreamName.PREFETCH
PEER_WORD = 9


class Stand:
    """A link of a byte per nanosecond each way. `ended` are the copies that have, with their times."""

    def __init__(self, *, equal: bool = False) -> None:
        self.agenda, self.semaphores = EventQueue(), TimelineSemaphores()
        bus = Bus(self.agenda, 0)
        self.ended: list[tuple[StreamName, int]] = []
        inwards = Link(bus, 10**9, equal=equal)
        self.streams = Streams(self.semaphores, Links(inwards, Link(bus, 10**9)), done=self._ended)

    def load(self, value: int, nbytes: int, stream: StreamName = StreamName.WEIGHTS) -> EventHandle:
        event = EventHandle(0 if stream is StreamName.WEIGHTS else 2, value)
        self.streams.load(LoadWeights(stream, ModelId("m0"), event), nbytes)
        return event

    def swap_in(self, value: int, blocks: int, after: EventHandle | None = None, *, ahead: bool = False) -> None:
        event = EventHandle(1, value)
        self.streams.copy(CopyBlocks(StreamName.SWAP_IN, SHAPE, ((0, 0, blocks),), after, event, ahead))

    def _ended(self, copy: Copy) -> None:
        self.ended.append((copy.stream, self.agenda.now_ns))


def test_a_stream_copies_in_order_and_says_how_far_it_is() -> None:
    stand = Stand()
    first, second = stand.load(1, 500), stand.load(2, 300)
    stand.agenda.run(until_ns=501)
    assert stand.semaphores.passed(first) and not stand.semaphores.passed(second)
    assert stand.streams.progress() == [Progress(StreamName.WEIGHTS, 1)]
    assert stand.streams.progress() == [] and stand.streams.in_flight
    stand.agenda.run()
    assert stand.ended == [(StreamName.WEIGHTS, 500), (StreamName.WEIGHTS, 800)]


def test_what_has_not_been_told_is_in_flight() -> None:
    stand = Stand()
    stand.streams.wipe(WipePages((PageRun(0, 3),), EventHandle(4, 1)))
    stand.agenda.run()
    assert stand.streams.in_flight
    assert stand.streams.progress() == [Progress(StreamName.SCRUB, 1)]
    assert not stand.streams.in_flight


def test_a_copy_begins_when_what_it_waits_for_has_passed() -> None:
    stand = Stand()
    peer = EventHandle(PEER_WORD, 5)
    stand.swap_in(1, 2, after=peer)
    stand.agenda.at(100, stand.semaphores.signal, peer)
    stand.agenda.run()
    assert stand.ended == [(StreamName.SWAP_IN, 100 + 2 * SHAPE.block_bytes)]


def test_equals_share_the_link() -> None:
    stand, published = Stand(), Stand(equal=True)
    stand.load(1, 2 * BLOCK, PREFETCH)
    stand.swap_in(1, 1, ahead=True)
    published.load(1, 2 * BLOCK)
    published.swap_in(1, 1)
    for each, weights in ((stand, PREFETCH), (published, StreamName.WEIGHTS)):
        each.agenda.run()
        assert each.ended == [(StreamName.SWAP_IN, 2 * BLOCK), (weights, 3 * BLOCK)]


def test_kv_that_is_wanted_comes_first_then_weights_then_what_is_for_later() -> None:
    stand = Stand()
    stand.load(1, 4 * BLOCK, PREFETCH)
    stand.agenda.at(BLOCK, stand.load, 1, 3 * BLOCK)
    stand.agenda.at(2 * BLOCK, stand.swap_in, 1, 1)
    stand.agenda.run()
    assert stand.ended == [(StreamName.SWAP_IN, 3 * BLOCK), (StreamName.WEIGHTS, 5 * BLOCK), (PREFETCH, 8 * BLOCK)]


def test_what_is_in_front_of_something_urgent_is_as_urgent() -> None:
    stand = Stand()
    stand.swap_in(1, 2, ahead=True)
    stand.load(1, 2 * BLOCK)
    stand.agenda.at(BLOCK, stand.swap_in, 2, 1)
    stand.agenda.run()
    assert stand.ended == [
        (StreamName.SWAP_IN, 3 * BLOCK),
        (StreamName.SWAP_IN, 4 * BLOCK),
        (StreamName.WEIGHTS, 5 * BLOCK),
    ]


def test_what_is_abandoned_while_it_waits_ends_at_once() -> None:
    stand = Stand()
    prefetched = stand.load(1, 2 * BLOCK, PREFETCH)
    stand.load(1, 3 * BLOCK)
    stand.agenda.at(BLOCK, stand.streams.abandon, prefetched)
    stand.agenda.run()
    assert stand.ended == [(PREFETCH, BLOCK), (StreamName.WEIGHTS, 3 * BLOCK)]


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 2000), st.integers(0, 2)), min_size=1, max_size=12))
def test_order_costs_no_bandwidth(copies: list[tuple[int, int, int]]) -> None:
    """When all have ended does not depend on which went first, but for the rounding of each share."""
    last_ns = []
    for equal in (False, True):
        agenda, ended = EventQueue(), list[int]()
        link = Link(Bus(agenda, 0), 10**9, equal=equal)
        for at_ns, nbytes, urgency in copies:
            agenda.at(at_ns, partial(link.start, nbytes, lambda _: ended.append(agenda.now_ns), urgency=urgency))  # noqa: B023
        agenda.run()
        assert len(ended) == len(copies)
        last_ns.append(max(ended))
    assert abs(last_ns[0] - last_ns[1]) <= 2 * len(copies)


def test_what_is_left_of_an_abandoned_copy_is_not_copied() -> None:
    stand = Stand()
    first, second = stand.load(1, 1000), stand.load(2, 1000)
    stand.agenda.at(100, stand.streams.abandon, first)
    stand.agenda.at(150, stand.streams.abandon, second)
    stand.agenda.run()
    assert stand.ended == [(StreamName.WEIGHTS, 100), (StreamName.WEIGHTS, 150)]
