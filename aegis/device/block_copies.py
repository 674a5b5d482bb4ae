"""Copies of KV blocks as few, long pieces: what is adjacent on both sides moves in one go.

Blocks of a small model, scattered, are copied at half the bandwidth of a long piece: finding the long ones pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from aegis.core.ids import BlockId

_NO_SEAM = 1 << 62
_BEFORE = (-2, -2)  # adjacent to no block


def block_copies(
    pairs: Sequence[tuple[BlockId, BlockId]], *, slab_bytes: int, block_bytes: int, source: int, target: int
) -> list[tuple[int, int, int]]:
    """`(destination, source, nbytes)` for `(source, destination)` blocks of two regions that begin at `source` and
    `target`, which lie in slabs alike. No block is named twice on a side; the order is that of the source."""
    per_slab, tail_bytes = divmod(slab_bytes, block_bytes)
    seam = per_slab if tail_bytes else _NO_SEAM  # where a slab ends in a tail, no piece goes on
    blocks = sorted(pairs)
    starts = [
        index
        for index, ((a, b), (c, d)) in enumerate(pairwise([_BEFORE, *blocks]))
        if c != a + 1 or d != b + 1 or not (c % seam and d % seam)
    ]

    def offset(block: int) -> int:
        return block * block_bytes + block // per_slab * tail_bytes

    return [
        (target + offset(blocks[start][1]), source + offset(blocks[start][0]), (stop - start) * block_bytes)
        for start, stop in pairwise([*starts, len(blocks)])
    ]
