"""The slabs of one shape, kept in the order in which they are filled: the fullest first, of equal ones the lowest.

The laws are those of `memory.slab_pool`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from aegis.core.block_runs import append_run
from aegis.core.errors import LawBroken
from aegis.core.ids import BlockRun, SlabId

_SLAB_BITS: Final = 32
_SLAB: Final = (1 << _SLAB_BITS) - 1


@dataclass(slots=True)
class Slab:
    """The blocks of one slab by their states, as bit masks: bit i stands for block `first + i`. So many blocks at a
    time change their state at the cost of one."""

    slab: SlabId
    first: int
    free: int
    vacant: int  # the number of these
    reserved: int = 0
    used: int = 0
    moving: int = 0

    def draw(self, count: int, into: list[BlockRun], *, used: bool) -> int:
        """Reserves, or uses, the lowest free blocks, at most `count`. Returns how many."""
        free, left = self.free, count
        rest, stop = free, 0
        while rest and left:
            lowest = rest & -rest
            start = lowest.bit_length() - 1
            others = rest & rest + lowest  # adjacent ones: a carry runs through them
            stop = (rest ^ others).bit_length()
            if stop - start > left:
                stop = start + left
            append_run(into, self.first + start, self.first + stop)
            left -= stop - start
            rest = others
        drawn = free & (1 << stop) - 1 if left == 0 else free
        if used:
            self.used |= drawn
        else:
            self.reserved |= drawn
        self.free ^= drawn
        self.vacant -= count - left
        return count - left

    def commit(self, blocks: int) -> None:
        assert self.reserved & blocks == blocks, "not reserved"
        self.reserved ^= blocks
        self.used |= blocks

    def give_up(self, blocks: int) -> None:
        """The blocks are not reserved or used any more; the caller says what they are now."""
        reserved = self.reserved & blocks
        used = blocks ^ reserved
        assert self.used & used == used, "free, or moving"
        self.reserved ^= reserved
        self.used ^= used

    def take_back(self, blocks: int) -> bool:
        """Blocks that were given up, or reclaimed, are free now. Whether any block still is not."""
        self.free |= blocks
        self.vacant += blocks.bit_count()
        return bool(self.reserved or self.used or self.moving)

    def reclaim(self, blocks: int) -> None:
        """The blocks are not moving any more; the caller says what they are now."""
        assert self.moving & blocks == blocks, "not moving"
        self.moving ^= blocks

    def runs_used(self) -> tuple[BlockRun, ...]:
        runs, left = list[BlockRun](), self.used
        while left:
            run = left & ~(left + (left & -left))
            at = self.first + (run & -run).bit_length() - 1
            runs.append((at, at + run.bit_count()))
            left ^= run
        return tuple(runs)

    def check(self, per_slab: int) -> None:
        """Raises LawBroken if S1, S2 or S3 does not hold in this slab."""
        states = (self.free, self.reserved, self.used, self.moving)
        blocks = sum(state.bit_count() for state in states)
        if not self.reserved | self.used | self.moving:
            raise LawBroken(f"S2: slab {self.slab} has no block taken")
        if (self.free | self.reserved | self.used | self.moving).bit_count() != blocks:
            raise LawBroken(f"S3: slab {self.slab} has blocks in two states")
        if blocks != per_slab:
            raise LawBroken(f"S1: slab {self.slab}: {blocks} blocks are in a state, there are {per_slab}")
        if self.vacant != self.free.bit_count():
            raise LawBroken(f"S1: slab {self.slab} counts {self.vacant} free blocks, and has {self.free.bit_count()}")


@dataclass(slots=True)
class ShapeSlabs:
    """`order`: the ranks of the slabs with free blocks, sorted."""

    per_slab: int
    slabs: dict[SlabId, Slab] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    free: int = 0  # blocks, over all slabs

    def slab_of(self, block: int) -> Slab:
        return self.slabs[SlabId(block // self.per_slab)]

    @property
    def emptiest(self) -> Slab:
        """The emptiest slab of those with a free block."""
        return self.slabs[SlabId(self.order[-1] & _SLAB)]

    def pieces(self, runs: Iterable[BlockRun]) -> list[tuple[Slab, int]]:
        """The blocks of each slab, each slab once."""
        masks: dict[int, int] = {}
        size, last, mask = self.per_slab, -1, 0
        for start, stop in runs:
            while start < stop:
                slab, at = start // size, start % size
                count = stop - start if stop - start <= size - at else size - at
                if slab != last:  # seldom
                    if mask:
                        masks[last] = mask
                    last, mask = slab, masks.get(slab, 0)
                mask |= (1 << count) - 1 << at
                start += count
        if mask:
            masks[last] = mask
        return [(self.slabs[SlabId(slab)], mask) for slab, mask in masks.items()]

    def draw(self, count: int, into: list[BlockRun], *, used: bool) -> int:
        """Reserves, or uses, at most `count` of the free blocks in the slabs held, as few runs: those of the fullest
        slab that has so many, or else all of the emptiest one and then the rest likewise. Returns how many."""
        order, left = self.order, count
        while left and order:
            at = min(bisect_left(order, left << _SLAB_BITS), len(order) - 1)
            slab = self.slabs[SlabId(order.pop(at) & _SLAB)]
            left -= slab.draw(left, into, used=used)
            if slab.vacant:
                insort(order, _rank(slab))
        self.free -= count - left
        return count - left

    def draw_beside(self, slab: Slab, count: int) -> list[BlockRun]:
        """Uses as many out of the other slabs, which must have them."""
        drawn: list[BlockRun] = []
        self._delist(slab)
        assert self.draw(count, drawn, used=True) == count, "the shape is not sparse"
        insort(self.order, _rank(slab))
        return drawn

    def open(self, slab_id: SlabId, count: int, into: list[BlockRun], *, used: bool) -> int:
        """Reserves, or uses, at most `count` blocks of a slab that is new, the lowest ones. Returns how many."""
        size, first = self.per_slab, slab_id * self.per_slab
        count = min(count, size)
        taken = (1 << count) - 1
        slab = self.slabs[slab_id] = Slab(slab_id, first, (1 << size) - 1 ^ taken, size - count)
        slab.reserved, slab.used = (0, taken) if used else (taken, 0)
        append_run(into, first, first + count)
        if slab.vacant:
            self.free += slab.vacant
            insort(self.order, _rank(slab))
        return count

    def put_back(self, slab: Slab, blocks: int) -> bool:
        """Blocks of the slab that are in no other state are free now. True: all its blocks are, it is not held any
        more."""
        before = slab.vacant
        if before:
            self._delist(slab)
        taken = slab.take_back(blocks)
        self.free += slab.vacant - before
        if taken:
            insort(self.order, _rank(slab))
            return False
        del self.slabs[slab.slab]
        self.free -= self.per_slab
        return True

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        for slab in self.slabs.values():
            slab.check(self.per_slab)
        if self.free != sum(slab.vacant for slab in self.slabs.values()):
            raise LawBroken("S1: the count of free blocks is off")
        if self.order != sorted(_rank(slab) for slab in self.slabs.values() if slab.vacant):
            raise LawBroken("S4: the order of filling is off")

    def _delist(self, slab: Slab) -> None:
        del self.order[bisect_left(self.order, _rank(slab))]


def _rank(slab: Slab) -> int:
    """The place of the slab in the order of filling: the fullest first, of equal ones the lowest."""
    return slab.vacant << _SLAB_BITS | slab.slab
