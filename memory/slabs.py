"""Slabs: KV cache of every shape in one region (Aegaeon §5.2, unified KV cache).

A region is cut in slabs of one size. A slab belongs to one shape while any of its blocks is taken and goes back when
none is. A block is free, reserved (allocated, its content not there yet), used, or moving: given up by its holder while
a transfer may still read or write it. Moving blocks are the move list of Aegaeon §5.3: they are not allocatable until
`reclaim` has seen their event pass (rule 3).

Sequences end in any order and leave holes. Filling the fullest slabs first does not close them; `compact` does, by
emptying a slab into the holes of others.

Laws: (S1) free + reserved + used + moving == blocks of all slabs held; (S2) a slab has one shape and at least one
block taken; (S3) what a slab lists as free is in no other state.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import neg
from typing import Protocol

from aegis.core.errors import LawBroken
from aegis.core.ids import BlockId, SlabId
from aegis.core.model import KvShape
from aegis.core.request import EventHandle


@dataclass(frozen=True, slots=True)
class NoBlocks:
    """A refusal: the region lacks `slabs` more slabs to give `wanted` blocks."""

    wanted: int
    slabs: int


class SlabSource(Protocol):
    """Where a region's slabs come from: a device's page pool, or the node's leases."""

    def available(self) -> int:
        """How many slabs `take` would give now."""
        ...

    def take(self) -> SlabId: ...

    def give(self, slab: SlabId) -> None: ...


class _State(Enum):
    RESERVED = "reserved"
    USED = "used"
    MOVING = "moving"


@dataclass(slots=True)
class _Slab:
    free: list[BlockId]  # a stack, the lowest on top
    taken: dict[BlockId, _State] = field(default_factory=dict)


@dataclass(slots=True)
class _Shape:
    per_slab: int
    slabs: dict[SlabId, _Slab] = field(default_factory=dict)
    free: int = 0  # blocks, over all slabs

    def slab_of(self, block: BlockId) -> _Slab:
        return self.slabs[SlabId(block // self.per_slab)]


@dataclass(frozen=True, slots=True)
class ShapeUse:
    """One shape's part of a region."""

    slab_bytes: int
    block_bytes: int
    slabs: int
    free: int
    reserved: int
    used: int
    moving: int

    @property
    def fragmentation(self) -> float:
        """The share of its slabs' bytes that hold no block: free blocks, and the end of a slab where no block fits."""
        taken = self.reserved + self.used + self.moving
        return 1 - taken * self.block_bytes / (self.slabs * self.slab_bytes)


class SlabPool:
    """The blocks of one region. Allocation is all or nothing and fills the fullest slabs first."""

    __slots__ = ("_moving", "_shapes", "_source", "slab_bytes")

    def __init__(self, slab_bytes: int, source: SlabSource) -> None:
        self.slab_bytes = slab_bytes
        self._source = source
        self._shapes: dict[KvShape, _Shape] = {}
        self._moving: list[tuple[EventHandle, KvShape, tuple[BlockId, ...]]] = []

    def per_slab(self, shape: KvShape) -> int:
        return self._of(shape).per_slab

    def room(self, shape: KvShape) -> int:
        """Blocks that could be allocated now."""
        held = self._of(shape)
        return held.free + self._source.available() * held.per_slab

    def slabs_for(self, shape: KvShape, count: int) -> int:
        """Slabs that it takes, beside those the shape holds, to allocate so many blocks."""
        held = self._of(shape)
        return max(-(-(count - held.free) // held.per_slab), 0)

    def alloc(self, shape: KvShape, count: int) -> tuple[BlockId, ...] | NoBlocks:
        """Reserves `count` blocks."""
        held = self._of(shape)
        short = count - self.room(shape)
        if short > 0:
            return NoBlocks(count, -(-short // held.per_slab))
        blocks: list[BlockId] = []
        for slab in sorted((s for s in held.slabs.values() if s.free), key=lambda s: (len(s.free), s.free[-1])):
            self._draw(held, slab, count, blocks)
        while len(blocks) < count:
            self._draw(held, self._open(held), count, blocks)
        return tuple(blocks)

    def commit(self, shape: KvShape, blocks: Iterable[BlockId]) -> None:
        """Reserved blocks now hold what they were reserved for."""
        self._move(shape, blocks, {_State.RESERVED: _State.USED})

    def free(self, shape: KvShape, blocks: Iterable[BlockId]) -> None:
        """Gives up blocks that no transfer touches."""
        held = self._of(shape)
        for block in blocks:
            assert held.slab_of(block).taken[block] is not _State.MOVING
            self._drop(held, block)

    def free_after(self, shape: KvShape, blocks: Sequence[BlockId], event: EventHandle) -> None:
        """Rule 3: the blocks stay on the move list until `event` has passed."""
        self._move(shape, blocks, {_State.RESERVED: _State.MOVING, _State.USED: _State.MOVING})
        if blocks:
            self._moving.append((event, shape, tuple(blocks)))

    def reclaim(self, passed: Callable[[EventHandle], bool]) -> int:
        """The reclaimer: frees what no transfer touches any more. Returns how many blocks."""
        waiting, count = [], 0
        for event, shape, blocks in self._moving:
            if not passed(event):
                waiting.append((event, shape, blocks))
                continue
            held = self._of(shape)
            for block in blocks:
                self._drop(held, block)
            count += len(blocks)
        self._moving = waiting
        return count

    def sparse(self) -> list[tuple[KvShape, tuple[BlockId, ...]]]:
        """Shapes of which the emptiest slab could be emptied into the holes of the others, with some of these left to
        grow into; and the blocks in that slab, all of them used."""
        found = []
        for shape, held in self._shapes.items():
            if held.slabs and 4 * held.free >= 5 * held.per_slab:
                taken = min(held.slabs.items(), key=_emptiest)[1].taken
                if all(state is _State.USED for state in taken.values()):
                    found.append((shape, tuple(sorted(taken))))
        return found

    def compact(self, shape: KvShape, blocks: Sequence[BlockId]) -> tuple[BlockId, ...]:
        """Empties the slab that `sparse` named: where each block goes. They are to be copied before anything else is
        done to any of them."""
        held, targets = self._of(shape), list[BlockId]()
        source = SlabId(blocks[0] // held.per_slab)
        for slab_id, slab in sorted(held.slabs.items(), key=_emptiest, reverse=True):
            if slab_id != source:
                self._draw(held, slab, len(blocks), targets)
        assert len(targets) == len(blocks), "the shape is not sparse"
        self.commit(shape, targets)
        self.free(shape, blocks)
        return tuple(targets)

    @property
    def moving(self) -> bool:
        """Whether the move list holds anything."""
        return bool(self._moving)

    def use(self) -> dict[KvShape, ShapeUse]:
        """What each shape holds, for those that hold anything."""
        return {shape: self._use(shape, held) for shape, held in self._shapes.items() if held.slabs}

    def check(self) -> None:
        """Raises LawBroken where a law does not hold."""
        seen: set[SlabId] = set()
        for held in self._shapes.values():
            for slab_id, slab in held.slabs.items():
                if not slab.taken or slab_id in seen:
                    raise LawBroken(f"S2: slab {slab_id} has no block taken, or two shapes")
                seen.add(slab_id)
                if len(slab.free) + len(slab.taken) != held.per_slab:
                    raise LawBroken(f"S1: slab {slab_id}: {len(slab.free)} + {len(slab.taken)} != {held.per_slab}")
                if not slab.taken.keys().isdisjoint(slab.free):
                    raise LawBroken(f"S3: slab {slab_id} has blocks both free and taken")
            if held.free != sum(len(slab.free) for slab in held.slabs.values()):
                raise LawBroken("S1: the count of free blocks is off")
        if sum(len(blocks) for _, _, blocks in self._moving) != sum(use.moving for use in self.use().values()):
            raise LawBroken("S1: the move list and the blocks' states differ")

    def _of(self, shape: KvShape) -> _Shape:
        held = self._shapes.get(shape)
        if held is None:
            per_slab = self.slab_bytes // shape.block_bytes
            assert per_slab > 0, "registration refuses models whose block is larger than a slab"
            held = self._shapes[shape] = _Shape(per_slab)
        return held

    def _use(self, shape: KvShape, held: _Shape) -> ShapeUse:
        states = [state for slab in held.slabs.values() for state in slab.taken.values()]
        return ShapeUse(
            slab_bytes=self.slab_bytes,
            block_bytes=shape.block_bytes,
            slabs=len(held.slabs),
            free=held.free,
            reserved=states.count(_State.RESERVED),
            used=states.count(_State.USED),
            moving=states.count(_State.MOVING),
        )

    def _open(self, held: _Shape) -> _Slab:
        slab_id = self._source.take()
        first = slab_id * held.per_slab
        slab = _Slab([BlockId(block) for block in range(first + held.per_slab - 1, first - 1, -1)])
        held.slabs[slab_id] = slab
        held.free += held.per_slab
        return slab

    def _draw(self, held: _Shape, slab: _Slab, count: int, into: list[BlockId]) -> None:
        taken = min(count - len(into), len(slab.free))
        for _ in range(taken):
            block = slab.free.pop()
            slab.taken[block] = _State.RESERVED
            into.append(block)
        held.free -= taken

    def _move(self, shape: KvShape, blocks: Iterable[BlockId], table: dict[_State, _State]) -> None:
        held = self._of(shape)
        for block in blocks:
            taken = held.slab_of(block).taken
            taken[block] = table[taken[block]]

    def _drop(self, held: _Shape, block: BlockId) -> None:
        slab_id = SlabId(block // held.per_slab)
        slab = held.slabs[slab_id]
        del slab.taken[block]
        insort(slab.free, block, key=neg)  # what is adjacent is copied in one go
        held.free += 1
        if not slab.taken:
            del held.slabs[slab_id]
            held.free -= held.per_slab
            self._source.give(slab_id)


def _emptiest(item: tuple[SlabId, _Slab]) -> tuple[int, SlabId]:
    return len(item[1].taken), item[0]
