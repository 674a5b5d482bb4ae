"""Slabs under random use: shapes, states, and the move list that keeps touched blocks from being handed out."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.errors import LawBroken
from aegis.core.ids import BlockId, SlabId
from aegis.core.model import KvShape
from aegis.core.request import EventHandle
from memory.slabs import NoBlocks, SlabPool, _State
from tests.sim.pretended import make_shape

SLAB = 1024
SHAPES = (make_shape(128), make_shape(256), make_shape(384), make_shape(1024))  # 8, 4, 2 and 1 blocks in a slab


class Shelf:
    """A slab source that says when a slab is taken or given twice."""

    def __init__(self, slabs: int) -> None:
        self.free = [SlabId(i) for i in range(slabs - 1, -1, -1)]
        self.held: set[SlabId] = set()

    def available(self) -> int:
        return len(self.free)

    def take(self) -> SlabId:
        slab = self.free.pop()
        self.held.add(slab)
        return slab

    def give(self, slab: SlabId) -> None:
        self.held.remove(slab)
        self.free.append(slab)


class Slabs(RuleBasedStateMachine):
    """Blocks are kept in a plain book: (shape, block) → state, and for moving ones the event they wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(5)
        self.pool = SlabPool(SLAB, self.shelf)
        self.book: dict[tuple[KvShape, BlockId], str] = {}
        self.events: dict[EventHandle, list[tuple[KvShape, BlockId]]] = {}
        self.passed: set[EventHandle] = set()
        self.next_event = 0

    def some(self, data: st.DataObject, shape: KvShape, *states: str) -> list[BlockId]:
        held = sorted(b for (s, b), state in self.book.items() if s == shape and state in states)
        return data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []

    @rule(shape=st.sampled_from(SHAPES), count=st.integers(0, 12))
    def alloc(self, shape: KvShape, count: int) -> None:
        room, per_slab = self.pool.room(shape), SLAB // shape.block_bytes
        blocks = self.pool.alloc(shape, count)
        if isinstance(blocks, NoBlocks):
            assert count > room and blocks == NoBlocks(count, -(-(count - room) // per_slab))
            return
        assert len(set(blocks)) == len(blocks) == count <= room
        for block in blocks:
            assert (shape, block) not in self.book, "rule 3: a block was handed out that is taken or still touched"
            self.book[shape, block] = "reserved"

    @rule(data=st.data(), shape=st.sampled_from(SHAPES))
    def commit(self, data: st.DataObject, shape: KvShape) -> None:
        blocks = self.some(data, shape, "reserved")
        self.pool.commit(shape, blocks)
        self.book |= {(shape, block): "used" for block in blocks}

    @rule(data=st.data(), shape=st.sampled_from(SHAPES))
    def free(self, data: st.DataObject, shape: KvShape) -> None:
        blocks = self.some(data, shape, "reserved", "used")
        self.pool.free(shape, blocks)
        for block in blocks:
            del self.book[shape, block]

    @rule(data=st.data(), shape=st.sampled_from(SHAPES))
    def free_after(self, data: st.DataObject, shape: KvShape) -> None:
        blocks = self.some(data, shape, "reserved", "used")
        self.next_event += 1
        event = EventHandle(0, self.next_event)
        self.pool.free_after(shape, blocks, event)
        self.events[event] = [(shape, block) for block in blocks]
        self.book |= {(shape, block): "moving" for block in blocks}

    @rule(data=st.data())
    def passes(self, data: st.DataObject) -> None:
        if self.events:
            self.passed.add(data.draw(st.sampled_from(sorted(self.events, key=lambda e: e.value))))

    @rule()
    def reclaim(self) -> None:
        done = [key for event in self.passed for key in self.events.pop(event)]
        assert self.pool.reclaim(lambda event: event in self.passed) == len(done)
        self.passed.clear()
        for key in done:
            del self.book[key]

    @invariant()
    def law_s1_states_add_up(self) -> None:
        self.pool.check()
        use = self.pool.use()
        for shape in SHAPES:
            states = [state for (s, _), state in self.book.items() if s == shape]
            if not states:
                assert shape not in use
                continue
            u = use[shape]
            assert (u.reserved, u.used, u.moving) == tuple(states.count(x) for x in ("reserved", "used", "moving"))
            assert u.free + u.reserved + u.used + u.moving == u.slabs * (SLAB // shape.block_bytes)
            assert u.fragmentation == 1 - len(states) * shape.block_bytes / (u.slabs * SLAB)

    @invariant()
    def law_s2_a_slab_has_one_shape_and_goes_back_when_empty(self) -> None:
        slabs = {(shape, block // (SLAB // shape.block_bytes)) for shape, block in self.book}
        assert len({slab for _, slab in slabs}) == len(slabs)
        assert self.shelf.held == {slab for _, slab in slabs}

    @invariant()
    def law_s3_what_is_free_is_nothing_else(self) -> None:
        for shape, held in self.pool._shapes.items():
            for slab in held.slabs.values():
                assert len(set(slab.free)) == len(slab.free)
                assert not any((shape, block) in self.book for block in slab.free)

    @invariant()
    def the_move_list_is_known(self) -> None:
        assert self.pool.moving == any(self.events.values())


Slabs.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSlabs = Slabs.TestCase


def test_the_fullest_slab_is_filled_first() -> None:
    pool = SlabPool(SLAB, Shelf(3))
    blocks = pool.alloc(SHAPES[1], 12)
    assert not isinstance(blocks, NoBlocks)
    pool.free(SHAPES[1], [*blocks[0:3], *blocks[4:6], *blocks[8:9]])
    again = pool.alloc(SHAPES[1], 3)
    assert not isinstance(again, NoBlocks)
    assert sorted(again) == sorted([blocks[8], *blocks[4:6]])


def test_a_refusal_takes_nothing() -> None:
    shelf = Shelf(2)
    pool = SlabPool(SLAB, shelf)
    assert pool.alloc(SHAPES[3], 3) == NoBlocks(3, 1)
    assert shelf.available() == 2 and not pool.use()


def test_rule_3_a_moving_block_is_not_handed_out_before_its_event_was_seen_to_pass() -> None:
    pool, event = SlabPool(SLAB, Shelf(1)), EventHandle(0, 1)
    blocks = pool.alloc(SHAPES[3], 1)
    assert not isinstance(blocks, NoBlocks)
    pool.free_after(SHAPES[3], blocks, event)
    assert pool.alloc(SHAPES[3], 1) == NoBlocks(1, 1)
    assert pool.reclaim(lambda _: False) == 0
    assert pool.alloc(SHAPES[3], 1) == NoBlocks(1, 1)
    assert pool.reclaim(lambda e: e == event) == 1
    assert pool.alloc(SHAPES[3], 1) == blocks


def test_a_moving_block_cannot_be_freed_or_moved_again() -> None:
    pool = SlabPool(SLAB, Shelf(1))
    blocks = pool.alloc(SHAPES[0], 1)
    assert not isinstance(blocks, NoBlocks)
    pool.free_after(SHAPES[0], blocks, EventHandle(0, 1))
    with pytest.raises(AssertionError):
        pool.free(SHAPES[0], blocks)
    with pytest.raises(KeyError):
        pool.free_after(SHAPES[0], blocks, EventHandle(0, 2))


def broken(law: str) -> SlabPool:
    pool = SlabPool(SLAB, Shelf(2))
    blocks = pool.alloc(SHAPES[1], 2)
    assert not isinstance(blocks, NoBlocks)
    held = pool._shapes[SHAPES[1]]
    slab = next(iter(held.slabs.values()))
    match law:
        case "S1: slab":
            slab.free.pop()
        case "S1: the count":
            held.free += 1
        case "S1: the move list":
            slab.taken[blocks[0]] = _State.MOVING
        case "S2":
            slab.taken.clear()
        case "S3":
            slab.free[0] = blocks[0]
    return pool


@pytest.mark.parametrize("law", ["S1: slab", "S1: the count", "S1: the move list", "S2", "S3"])
def test_check_finds_what_is_broken(law: str) -> None:
    with pytest.raises(LawBroken, match=law):
        broken(law).check()
