"""The places of a sequence's KV, and its ways between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aegis.core.block_runs import count_blocks, first_blocks
from aegis.core.effects import CopyBlocks, StreamName
from aegis.core.ids import PageRun, SlabId
from aegis.core.messages import FromInstance, GrantPages, GrantSlabs, KvReleased, NeedSlabs
from aegis.core.request import EventHandle, KvHandle
from aegis.sim.faults.fake_models import PAGE, make_spec
from decode.counters import Counters
from decode.kv_swap import KvSwap
from decode.sequences import Room, Sequence, Where
from memory.ledger import Ledger
from tests.sim.driven import PEER, ledger, make_job, sides

SPEC = make_spec(0, image_pages=1, block_bytes=PAGE // 2)
SHAPE = SPEC.manifest.kv
HANDLE = KvHandle(PEER, ((40, 42),), 20, EventHandle(99, 5))


class Harness:
    """KV of an instance on books of its own, and what it sent."""

    def __init__(self, *, pages: int = 8, slabs: int = 4) -> None:
        self.said: list[FromInstance] = []
        self.ledger: Ledger = ledger(pages)
        self.ledger.grant([SlabId(i) for i in range(slabs)])
        self.counters = Counters()
        self.kv = KvSwap(self.ledger, self.counters, self.said.append)

    def copies(self) -> list[CopyBlocks]:
        return [effect for effect in self.ledger.drain() if isinstance(effect, CopyBlocks)]

    def arrived(self, *, prompt: int = 20) -> Sequence:
        """A sequence whose KV has come from a peer."""
        count = SHAPE.blocks_for(prompt)
        handle = KvHandle(PEER, ((40, 40 + count),), prompt, EventHandle(99, 5))
        sequence = Sequence(make_job(1, SPEC, prompt=prompt), 1, 1, prompt, SPEC, handle)
        self.kv.bring_in(sequence)
        self.complete(StreamName.SWAP_IN)
        self.kv.settle()
        self.said.clear()
        self.ledger.drain()
        return sequence

    def complete(self, stream: StreamName) -> None:
        self.ledger.progress(stream, self.ledger.transfers._submitted[stream])
        self.ledger.check()

    @property
    def empty(self) -> bool:
        return not self.ledger.device.use() and not self.ledger.host.use()


def new() -> Sequence:
    return Sequence(make_job(1, SPEC, prompt=20), 1, 1, 20, SPEC, HANDLE)


def test_bring_in_reserves_the_next_position_too() -> None:
    harness, sequence = Harness(), Sequence(make_job(1, SPEC, prompt=32), 1, 1, 32, SPEC, HANDLE)
    harness.kv.bring_in(sequence)
    (copy,) = harness.copies()
    assert sides(copy) == (HANDLE.blocks, first_blocks(sequence.device, 2)) and copy.after == HANDLE.ready
    assert (sequence.held, sequence.where) == (3, Where.ARRIVING)
    assert harness.counters.swap_in_bytes == 2 * SHAPE.block_bytes


def test_what_is_ahead_of_the_next_step_is_given_up() -> None:
    harness = Harness()
    sequence = harness.arrived()
    before = sequence.device.copy()
    assert harness.kv.grow(sequence, 3)
    assert (count_blocks(sequence.device), harness.ledger.device.use()[SHAPE].used) == (5, 5)
    harness.kv.shrink(sequence)
    assert (sequence.device, sequence.held) == (before, 2) and harness.ledger.device.use()[SHAPE].used == 2
    harness.kv.shrink(sequence)
    assert sequence.device == before
    harness.ledger.check()


def test_settle_waits_for_the_sequences_own_copy() -> None:
    harness, first, second = Harness(), new(), new()
    harness.kv.bring_in(first)
    harness.kv.bring_in(second)
    harness.ledger.progress(StreamName.SWAP_IN, 1)
    harness.kv.settle()
    assert (first.where, second.where) == (Where.DEVICE, Where.ARRIVING)
    assert harness.said == [KvReleased(first.job.request, 1, HANDLE)] and first.handle is None
    use = harness.ledger.device.use()[SHAPE]
    assert (use.used, use.reserved) == (2, 2)


def test_only_blocks_with_something_in_them_are_saved() -> None:
    harness = Harness()
    sequence = harness.arrived(prompt=32)
    device = list(sequence.device)
    assert harness.kv.put_away(sequence) is Room.LATER
    (copy,) = harness.copies()
    assert count_blocks(device) == 3
    assert sides(copy) == (first_blocks(device, 2), sequence.host) and sequence.saved == copy.event
    assert harness.ledger.device.use()[SHAPE].moving == 3
    assert harness.counters.swap_out_bytes == 2 * SHAPE.block_bytes


def test_what_was_saved_comes_back_after_it_was_saved() -> None:
    harness = Harness()
    sequence = harness.arrived()
    harness.kv.put_away(sequence)
    harness.kv.bring_in(sequence)
    out, into = harness.copies()
    assert into.after == out.event and sides(into)[0] == sides(out)[1]
    harness.complete(StreamName.SWAP_OUT)
    harness.complete(StreamName.SWAP_IN)
    harness.kv.settle()
    assert sequence.where is Where.DEVICE and not harness.ledger.host.use() and harness.said == []


def test_dropped_in_a_peers_slabs() -> None:
    harness, sequence = Harness(), new()
    harness.kv.drop(sequence)
    assert harness.said == [KvReleased(sequence.job.request, 1, HANDLE)] and harness.empty


def test_dropped_while_arriving() -> None:
    harness, sequence = Harness(), new()
    harness.kv.bring_in(sequence)
    sequence.dropped = True
    harness.kv.drop(sequence)
    assert harness.said == [] and harness.kv.reads_from(PEER)
    harness.kv.settle()
    assert harness.said == [] and harness.kv.reads_from(PEER), "it has not passed yet"
    harness.complete(StreamName.SWAP_IN)
    harness.kv.settle()
    harness.kv.settle()
    assert harness.said == [KvReleased(sequence.job.request, 1, HANDLE)] and harness.empty
    assert not harness.kv.reads_from(PEER)


def test_dropped_on_the_device() -> None:
    harness = Harness()
    harness.kv.drop(harness.arrived())
    assert harness.empty and harness.said == []


@pytest.mark.parametrize("copied", [True, False])
def test_dropped_in_the_host(copied: bool) -> None:
    harness = Harness()
    sequence = harness.arrived()
    harness.kv.put_away(sequence)
    if copied:
        harness.complete(StreamName.SWAP_OUT)
    harness.kv.drop(sequence)
    assert copied or harness.ledger.host.use()[SHAPE].moving == 2
    if not copied:
        harness.complete(StreamName.SWAP_OUT)
    assert harness.empty


def test_dropped_while_saved_kv_arrives() -> None:
    harness = Harness()
    sequence = harness.arrived()
    harness.kv.put_away(sequence)
    harness.kv.bring_in(sequence)
    harness.kv.drop(sequence)
    harness.complete(StreamName.SWAP_OUT)
    assert harness.ledger.host.use()[SHAPE].moving == 2, "the swap-in still reads there"
    harness.complete(StreamName.SWAP_IN)
    assert harness.empty and not harness.kv.reads_from(PEER)


def test_growth_is_all_or_nothing() -> None:
    harness = Harness(pages=2)
    sequence = harness.arrived()
    assert harness.kv.grow(sequence, 2) and sequence.held == 4
    assert not harness.kv.grow(sequence, 1) and sequence.held == 4
    assert harness.ledger.device.use()[SHAPE].used == 4


def test_slabs_are_asked_for_and_then_the_sequence_given_up_or_put_away() -> None:
    harness = Harness(slabs=0)
    sequence = harness.arrived()
    assert harness.kv.put_away(sequence) is Room.LATER and harness.kv.put_away(sequence) is Room.LATER
    assert harness.said == [NeedSlabs(1)] and harness.kv.waiting
    harness.kv.on_message(GrantSlabs((), refused=True))
    assert not harness.kv.waiting and harness.kv.put_away(sequence) is Room.NOW
    assert sequence.where is Where.DEVICE, "giving up is the caller's"
    harness.kv.on_message(GrantSlabs((SlabId(3),)))
    assert harness.kv.put_away(sequence) is Room.LATER and sequence.where is Where.HOST
    assert harness.said == [NeedSlabs(1)]


def test_no_slab_is_returned_while_an_answer_counts_on_it() -> None:
    harness = Harness(slabs=3)
    sequence = harness.arrived(prompt=16 * 7)
    assert harness.kv.put_away(sequence) is Room.LATER and harness.said == [NeedSlabs(1)]
    assert harness.kv.surplus_slabs() == ()
    harness.kv.on_message(GrantSlabs((), refused=True))
    assert len(harness.kv.surplus_slabs()) == 2


def test_capacity_is_what_fits_beside_the_weights() -> None:
    assert Harness(pages=8).kv.capacity(SPEC) == 7 * 2


def test_of_a_shared_device_it_is_an_equal_share_or_what_the_instance_has() -> None:
    shared = replace(ledger(8).budget, on_device=2)
    poor = Ledger(shared, {name: i for i, name in enumerate(StreamName)}, address_pages=16)
    kv = KvSwap(poor, Counters(), lambda message: None)
    assert kv.capacity(SPEC) == 3 * 2
    poor.balloon.granted(GrantPages((PageRun(0, 6),)))
    assert kv.capacity(SPEC) == 5 * 2
