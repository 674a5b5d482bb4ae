"""Slabs: KV cache of every shape in one region (Aegaeon §5.2, unified KV cache).

A region is cut in slabs of one size. A slab belongs to one shape while any of its blocks is taken and goes back when
none is. A block is free, reserved (allocated, its content not there yet), used, or moving: given up by its holder while
a transfer may still read or write it. Moving blocks are the move list of Aegaeon §5.3: they are not allocatable until
`reclaim` has seen their event pass (rule 3).

Blocks come and go as runs; an operation costs what it touches of runs and slabs, however many blocks these are.

Sequences end in any order and leave holes. Filling the fullest slabs first does not close them; `compact` does, by
emptying a slab into the holes of others.

Laws: (S1) free + reserved + used + moving == blocks of all slabs held, and those that are free are counted; (S2) a slab
has one shape and at least one block taken; (S3) a block is in one state only; (S4) slabs with free blocks are known in
the order of their filling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aegis.core.block_runs import BlockCopy, Blocks, count_blocks, paired
from aegis.core.errors import LawBroken
from aegis.core.ids import BlockRun, SlabId
from aegis.core.model import KvShape
from aegis.core.request import EventHandle
from memory.shape_slabs import ShapeSlabs


@dataclass(frozen=True, slots=True)
class NoBlocks:
    """A refusal: the region lacks `slabs` more slabs to give `wanted` blocks."""

    wanted: int
    slabs: int


class SlabSource(Protocol):
    """The source of a region's slabs: a device's page pool, or the node's leases."""

    def available(self) -> int:
        """The number of slabs that `take` would give now."""
        ...

    def take(self) -> SlabId: ...

    def give(self, slab: SlabId) -> None: ...


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


class _Shapes(dict[KvShape, ShapeSlabs]):
    """A shape that is new holds no slab."""

    def __init__(self, slab_bytes: int) -> None:
        super().__init__()
        self._slab_bytes = slab_bytes

    def __missing__(self, shape: KvShape) -> ShapeSlabs:
        per_slab = self._slab_bytes // shape.block_bytes
        assert per_slab > 0, "registration refuses models whose block is larger than a slab"
        held = self[shape] = ShapeSlabs(per_slab)
        return held


class SlabPool:
    """The blocks of one region. Allocation is all or nothing and fills the fullest slabs first, the lowest blocks
    first."""

    __slots__ = ("_moving", "_passed", "_shapes", "_source", "slab_bytes")

    def __init__(self, slab_bytes: int, source: SlabSource, passed: Callable[[EventHandle], bool]) -> None:
        """`passed` says whether a transfer has ended."""
        self.slab_bytes = slab_bytes
        self._source = source
        self._passed = passed
        self._shapes = _Shapes(slab_bytes)
        self._moving: list[tuple[EventHandle, KvShape, Blocks]] = []

    def per_slab(self, shape: KvShape) -> int:
        return self._shapes[shape].per_slab

    def room(self, shape: KvShape) -> int:
        """Blocks that could be allocated now."""
        held = self._shapes[shape]
        return held.free + self._source.available() * held.per_slab

    def spare(self, shape: KvShape) -> int:
        """Free blocks of the slabs it holds."""
        return self._shapes[shape].free

    def slabs_for(self, shape: KvShape, count: int) -> int:
        """Slabs that it takes, beside those the shape holds, to allocate so many blocks."""
        held = self._shapes[shape]
        return max(-(-(count - held.free) // held.per_slab), 0)

    def alloc(self, shape: KvShape, count: int, *, used: bool = False) -> Blocks | NoBlocks:
        """Reserves `count` blocks; `used` ones need no `commit`."""
        held = self._shapes[shape]
        lacking = -(-(count - held.free) // held.per_slab) if count > held.free else 0
        available = self._source.available() if lacking else 0
        if lacking > available:
            return NoBlocks(count, lacking - available)
        runs: list[BlockRun] = []
        count -= held.draw(count, runs, used=used)
        for _ in range(lacking):
            count -= held.open(self._source.take(), count, runs, used=used)
        return tuple(runs)

    def commit(self, shape: KvShape, blocks: Iterable[BlockRun]) -> None:
        """Reserved blocks now hold what they were reserved for."""
        for slab, mask in self._shapes[shape].pieces(blocks):
            slab.commit(mask)

    def free(self, shape: KvShape, blocks: Iterable[BlockRun]) -> None:
        """Gives up blocks that no transfer touches."""
        held = self._shapes[shape]
        for slab, mask in held.pieces(blocks):
            slab.give_up(mask)
            if held.put_back(slab, mask):
                self._source.give(slab.slab)

    def free_after(self, shape: KvShape, blocks: Sequence[BlockRun], event: EventHandle) -> None:
        """Rule 3: unless `event` has passed already, the blocks stay on the move list until it has."""
        if self._passed(event):
            self.free(shape, blocks)
            return
        for slab, mask in self._shapes[shape].pieces(blocks):
            slab.give_up(mask)
            slab.moving |= mask
        if blocks:
            self._moving.append((event, shape, tuple(blocks)))

    def reclaim(self) -> int:
        """The reclaimer: frees what no transfer touches any more. Returns how many blocks."""
        waiting, count = [], 0
        for entry in self._moving:
            event, shape, blocks = entry
            if not self._passed(event):
                waiting.append(entry)
                continue
            held = self._shapes[shape]
            for slab, mask in held.pieces(blocks):
                slab.reclaim(mask)
                if held.put_back(slab, mask):
                    self._source.give(slab.slab)
            count += count_blocks(blocks)
        self._moving = waiting
        return count

    def sparse(self) -> list[tuple[KvShape, Blocks]]:
        """Shapes whose emptiest slab could be emptied into the holes of the others, which would have some left to grow
        into; and the blocks in that slab, all of which are used."""
        found = []
        for shape, held in self._shapes.items():
            if held.slabs and 4 * held.free >= 5 * held.per_slab:
                slab = held.emptiest
                if not slab.reserved | slab.moving:
                    found.append((shape, slab.runs_used()))
        return found

    def compact(self, shape: KvShape, blocks: Sequence[BlockRun]) -> tuple[BlockCopy, ...]:
        """Empties the slab that `sparse` named: what is to be copied, in the order of the sources, before anything else
        is done to any of these blocks."""
        held = self._shapes[shape]
        targets = held.draw_beside(held.slab_of(blocks[0][0]), count_blocks(blocks))
        self.free(shape, blocks)
        return paired(blocks, targets)

    @property
    def moving(self) -> bool:
        """Whether the move list holds anything."""
        return bool(self._moving)

    def use(self) -> dict[KvShape, ShapeUse]:
        """The use of each shape that holds anything."""
        return {shape: self._use(shape, held) for shape, held in self._shapes.items() if held.slabs}

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        seen: set[SlabId] = set()
        for held in self._shapes.values():
            if not seen.isdisjoint(held.slabs):
                raise LawBroken(f"S2: slabs {seen & held.slabs.keys()} have two shapes")
            seen |= held.slabs.keys()
            held.check()
        if sum(count_blocks(blocks) for _, _, blocks in self._moving) != sum(use.moving for use in self.use().values()):
            raise LawBroken("S1: the move list and the blocks' states differ")

    def _use(self, shape: KvShape, held: ShapeSlabs) -> ShapeUse:
        slabs = held.slabs.values()
        return ShapeUse(
            slab_bytes=self.slab_bytes,
            block_bytes=shape.block_bytes,
            slabs=len(slabs),
            free=held.free,
            reserved=sum(slab.reserved.bit_count() for slab in slabs),
            used=sum(slab.used.bit_count() for slab in slabs),
            moving=sum(slab.moving.bit_count() for slab in slabs),
        )
