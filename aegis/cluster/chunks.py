"""Pieces of memory, cut in chunks by their lengths alone: what is cut alike at both ends stays so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

CHUNK_BYTES = 2 << 20
"""Small enough for a chunk to be in the processor's cache still when its checksum is taken."""

PIECES_MAX = 512
"""Of a chunk: the system takes no more than 1024 at a time."""

Bytes = npt.NDArray[np.uint8]


class Piece(Struct, frozen=True, array_like=True):
    """`nbytes` from `start` on, of a region."""

    start: int
    nbytes: int


def cut(pieces: Sequence[Piece], chunk_bytes: int = CHUNK_BYTES) -> list[tuple[Piece, ...]]:
    """The pieces in order, in chunks of `chunk_bytes`, fewer only in the last one and where pieces are many."""
    chunks: list[tuple[Piece, ...]] = []
    chunk: list[Piece] = []
    room = chunk_bytes
    for start, left in ((piece.start, piece.nbytes) for piece in pieces):
        while left:
            count = min(left, room)
            chunk.append(Piece(start, count))
            start, left, room = start + count, left - count, room - count
            if not room or len(chunk) == PIECES_MAX:
                chunks.append(tuple(chunk))
                chunk, room = [], chunk_bytes
    return [*chunks, tuple(chunk)] if chunk else chunks


def within(region: Bytes, pieces: Sequence[Piece]) -> bool:
    return all(piece.start >= 0 and 0 < piece.nbytes <= len(region) - piece.start for piece in pieces)


def views(region: Bytes, pieces: Sequence[Piece]) -> list[memoryview]:
    """Views of the pieces, which lie within the region: to send from, or to put what comes."""
    memory = region.data
    return [memory[piece.start : piece.start + piece.nbytes] for piece in pieces]
