"""Slabs under random use: shapes, states, and the move list that keeps touched blocks from being handed out."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.block_runs import Blocks, block_ids, count_blocks, runs_of
from aegis.core.errors import LawBroken
from aegis.core.ids import BlockRun, SlabId
from aegis.core.model import KvShape
from aegis.core.request import EventHandle
from aegis.sim.faults.fake_models import make_shape
from memory.slab_pool import NoBlocks, SlabPool

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


def pool_of(slabs: int, *, passed: Collection[EventHandle] = ()) -> SlabPool:
    return SlabPool(SLAB, Shelf(slabs), passed.__contains__)


def take(pool: SlabPool, shape: KvShape, count: int) -> Blocks:
    blocks = pool.alloc(shape, count)
    assert not isinstance(blocks, NoBlocks)
    return blocks


class Slabs(RuleBasedStateMachine):
    """Blocks are kept one by one in a plain book: (shape, block) → state, and for moving ones the event they wait
    for."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(5)
        self.passed: set[EventHandle] = set()
        self.pool = SlabPool(SLAB, self.shelf, self.passed.__contains__)
        self.book: dict[tuple[KvShape, int], str] = {}
        self.events: dict[EventHandle, list[tuple[KvShape, int]]] = {}
        self.next_event = 0

    def some(self, data: st.DataObject, shape: KvShape, *states: str) -> Blocks:
        """Runs of blocks in these states, in any order."""
        held = sorted(b for (s, b), state in self.book.items() if s == shape and state in states)
        return runs_of(data.draw(st.permutations(held) | st.lists(st.sampled_from(held), unique=True))) if held else ()

    @rule(shape=st.sampled_from(SHAPES), count=st.integers(0, 12))
    def alloc(self, shape: KvShape, count: int) -> None:
        room, per_slab = self.pool.room(shape), SLAB // shape.block_bytes
        blocks = self.pool.alloc(shape, count)
        if isinstance(blocks, NoBlocks):
            assert count > room and blocks == NoBlocks(count, -(-(count - room) // per_slab))
            return
        taken = list(block_ids(blocks))
        assert len(set(taken)) == len(taken) == count <= room
        assert runs_of(taken) == blocks, "what is adjacent is one run"
        for block in taken:
            assert (shape, block) not in self.book, "rule 3: a block was handed out that is taken or still touched"
            self.book[shape, block] = "reserved"

    @rule(data=st.data(), shape=st.sampled_from(SHAPES))
    def commit(self, data: st.DataObject, shape: KvShape) -> None:
        blocks = self.some(data, shape, "reserved")
        self.pool.commit(shape, blocks)
        self.book |= {(shape, block): "used" for block in block_ids(blocks)}

    @rule(data=st.data(), shape=st.sampled_from(SHAPES))
    def free(self, data: st.DataObject, shape: KvShape) -> None:
        blocks = self.some(data, shape, "reserved", "used")
        self.pool.free(shape, blocks)
        for block in block_ids(blocks):
            del self.book[shape, block]

    @rule(data=st.data(), shape=st.sampled_from(SHAPES))
    def free_after(self, data: st.DataObject, shape: KvShape) -> None:
        blocks = self.some(data, shape, "reserved", "used")
        self.next_event += 1
        event = EventHandle(0, self.next_event)
        self.pool.free_after(shape, blocks, event)
        self.events[event] = [(shape, block) for block in block_ids(blocks)]
        self.book |= {(shape, block): "moving" for block in block_ids(blocks)}

    @rule(data=st.data())
    def passes(self, data: st.DataObject) -> None:
        if self.events:
            self.passed.add(data.draw(st.sampled_from(sorted(self.events, key=lambda e: e.value))))

    @rule()
    def reclaim(self) -> None:
        done = [key for event in self.passed for key in self.events.pop(event)]
        assert self.pool.reclaim() == len(done)
        self.passed.clear()
        for key in done:
            del self.book[key]

    @rule()
    def compact(self) -> None:
        for shape, blocks in self.pool.sparse():
            assert all(self.book[shape, block] == "used" for block in block_ids(blocks))
            for source, target, count in self.pool.compact(shape, blocks):
                for at in range(count):
                    assert (shape, target + at) not in self.book
                    self.book[shape, target + at] = self.book.pop((shape, source + at))

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
                for at in range(held.per_slab):
                    assert bool(slab.free >> at & 1) != ((shape, slab.first + at) in self.book)

    @invariant()
    def the_move_list_is_known(self) -> None:
        assert self.pool.moving == any(self.events.values())


Slabs.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSlabs = Slabs.TestCase


def holes(*free: int) -> tuple[SlabPool, list[int]]:
    """Slabs of four blocks, the last so many of each free; and where the slabs begin."""
    pool = pool_of(len(free))
    (run,) = take(pool, SHAPES[1], 4 * len(free))
    starts = list(range(*run, 4))
    pool.free(SHAPES[1], [(start + 4 - left, start + 4) for start, left in zip(starts, free, strict=True) if left])
    return pool, starts


def test_the_fullest_slab_is_filled_first_and_of_equal_ones_the_lowest() -> None:
    pool, starts = holes(3, 2, 1, 1, 0)
    assert [take(pool, SHAPES[1], 1)[0][0] for _ in range(7)] == [
        *(starts[2] + 3, starts[3] + 3),
        *(starts[1] + 2, starts[1] + 3),
        *(starts[0] + 1, starts[0] + 2, starts[0] + 3),
    ]


def test_what_fits_into_one_slab_is_not_scattered() -> None:
    pool, starts = holes(1, 3, 2)
    assert take(pool, SHAPES[1], 2) == ((starts[2] + 2, starts[2] + 4),)


def test_what_fits_into_no_slab_takes_few() -> None:
    pool, starts = holes(1, 1, 2, 3)
    assert take(pool, SHAPES[1], 4) == ((starts[3] + 1, starts[3] + 4), (starts[0] + 3, starts[0] + 4))


def test_holes_are_filled_before_a_slab_is_taken() -> None:
    shelf = Shelf(2)
    pool = SlabPool(SLAB, shelf, set[EventHandle]().__contains__)
    first = take(pool, SHAPES[1], 3)
    assert count_blocks(take(pool, SHAPES[1], 5)) == 5 and first == ((0, 3),)
    assert shelf.available() == 0 and pool.room(SHAPES[1]) == 0


def test_the_emptiest_slab_is_emptied_into_holes_once_a_slab_and_a_quarter_are_free() -> None:
    pool, starts = holes(1, 3, 0)
    pool.commit(SHAPES[1], [(starts[0], starts[0] + 3), (starts[1], starts[1] + 1)])
    pool.commit(SHAPES[1], [(starts[2], starts[2] + 4)])
    assert pool.sparse() == []
    pool.free(SHAPES[1], [(starts[2], starts[2] + 1)])
    ((shape, blocks),) = pool.sparse()
    assert blocks == ((starts[1], starts[1] + 1),)
    assert pool.compact(shape, blocks) == ((starts[1], starts[0] + 3, 1),)
    pool.check()
    use = pool.use()[shape]
    assert (use.slabs, use.used, use.free) == (2, 7, 1) and pool.sparse() == []


@pytest.mark.parametrize("state", ["reserved", "moving"])
def test_a_slab_is_not_emptied_while_any_of_its_blocks_is_under_way(state: str) -> None:
    pool, starts = holes(2, 3)
    taken = [(starts[0], starts[0] + 2), (starts[1], starts[1] + 1)]
    pool.commit(SHAPES[1], taken if state == "moving" else taken[:1])
    if state == "moving":
        pool.free_after(SHAPES[1], taken[1:], EventHandle(0, 1))
    assert pool.sparse() == []


def test_a_run_goes_on_from_slab_to_slab() -> None:
    assert take(pool_of(3), SHAPES[2], 6) == ((0, 6),)


def test_a_refusal_takes_nothing() -> None:
    shelf = Shelf(2)
    pool = SlabPool(SLAB, shelf, set[EventHandle]().__contains__)
    assert pool.alloc(SHAPES[3], 3) == NoBlocks(3, 1)
    assert shelf.available() == 2 and not pool.use()


def test_rule_3_a_moving_block_is_not_handed_out_before_its_event_was_seen_to_pass() -> None:
    event, passed = EventHandle(0, 1), set[EventHandle]()
    pool = pool_of(1, passed=passed)
    blocks = take(pool, SHAPES[3], 1)
    pool.free_after(SHAPES[3], blocks, event)
    assert pool.alloc(SHAPES[3], 1) == NoBlocks(1, 1)
    assert pool.reclaim() == 0
    assert pool.alloc(SHAPES[3], 1) == NoBlocks(1, 1)
    passed.add(event)
    assert pool.reclaim() == 1
    assert pool.alloc(SHAPES[3], 1) == blocks


def test_a_block_whose_event_has_passed_already_is_free_at_once() -> None:
    pool = pool_of(1, passed=[EventHandle(0, 1)])
    pool.free_after(SHAPES[3], take(pool, SHAPES[3], 1), EventHandle(0, 1))
    assert not pool.moving and not pool.use()


def test_a_moving_block_cannot_be_freed_moved_or_used_again() -> None:
    pool = pool_of(1)
    blocks = take(pool, SHAPES[0], 1)
    pool.free_after(SHAPES[0], blocks, EventHandle(0, 1))
    with pytest.raises(AssertionError):
        pool.free(SHAPES[0], blocks)
    with pytest.raises(AssertionError):
        pool.free_after(SHAPES[0], blocks, EventHandle(0, 2))
    with pytest.raises(AssertionError):
        pool.commit(SHAPES[0], blocks)


@pytest.mark.parametrize("again", [(0, 2), (1, 3)])
def test_a_run_with_a_free_block_in_it_cannot_be_freed(again: BlockRun) -> None:
    pool = pool_of(1)
    take(pool, SHAPES[0], 2)
    pool.free(SHAPES[0], [(0, 1)])
    with pytest.raises(AssertionError):
        pool.free(SHAPES[0], [again])


def broken(law: str) -> SlabPool:
    pool = pool_of(2)
    take(pool, SHAPES[1], 2)
    held = pool._shapes[SHAPES[1]]
    slab = next(iter(held.slabs.values()))
    match law:
        case "S1: slab 0: ":
            slab.free = 0b1000
        case "S1: slab 0 counts":
            slab.vacant += 1
            held.free += 1
        case "S1: the count":
            held.free += 1
        case "S1: the move list":
            slab.reserved, slab.moving = 0b01, 0b10
        case "S2: slab 0":
            slab.reserved, slab.free = 0, 0b1111
        case "S2: slabs":
            pool._shapes[SHAPES[2]] = held
        case "S3":
            slab.used = 0b10
        case "S4":
            held.order.clear()
    return pool


@pytest.mark.parametrize(
    "law",
    ["S1: slab 0: ", "S1: slab 0 counts", "S1: the count", "S1: the move list", "S2: slab 0", "S2: slabs", "S3", "S4"],
)
def test_check_finds_what_is_broken(law: str) -> None:
    with pytest.raises(LawBroken, match=law):
        broken(law).check()
