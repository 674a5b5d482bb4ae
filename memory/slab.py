"""The blocks of one slab by their states, as bit masks: bit i stands for block `first + i`.

So many blocks at a time change their state at the cost of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from aegis.core.block_runs import append_run
from aegis.core.errors import LawBroken
from aegis.core.ids import BlockRun, SlabId


@dataclass(slots=True)
class Slab:
    """Each block is free, reserved, used or moving."""

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
        """They are reserved or used no more; what they are now is the caller's to say."""
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
        """They move no more, likewise."""
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
