"""Copies of KV blocks as copies of bytes: where blocks are adjacent on both sides they move in one go.

Blocks of a small model, scattered, are copied at half the bandwidth of a long piece.
"""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.block_runs import BlockCopy


def block_copies(
    copies: Sequence[BlockCopy], *, slab_bytes: int, block_bytes: int, source: int, target: int
) -> list[tuple[int, int, int]]:
    """`(destination, source, nbytes)` for blocks of two regions that begin at `source` and `target` and are cut in
    slabs alike. Where a slab ends in a tail, no piece goes on."""
    per_slab, tail_bytes = divmod(slab_bytes, block_bytes)
    if not tail_bytes:
        return [(target + b * block_bytes, source + a * block_bytes, n * block_bytes) for a, b, n in copies]

    def offset(block: int) -> int:
        return block * block_bytes + block // per_slab * tail_bytes

    pieces = []
    for a, b, left in copies:
        while left:
            count = min(left, per_slab - a % per_slab, per_slab - b % per_slab)
            pieces.append((target + offset(b), source + offset(a), count * block_bytes))
            a, b, left = a + count, b + count, left - count
    return pieces
