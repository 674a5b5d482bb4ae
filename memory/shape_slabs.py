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
from memory.slab import Slab

_SLAB_BITS: Final = 32
_SLAB: Final = (1 << _SLAB_BITS) - 1


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
    """In their order: the fullest first, of equal ones the lowest."""
    return slab.vacant << _SLAB_BITS | slab.slab
