"""Both sides cut alike, whatever the pieces are, and what is cut is all of it."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aegis.cluster.chunks import PIECES_MAX, Piece, cut, views, within

SIZES = st.lists(st.integers(1, 50), max_size=30)


@given(sizes=SIZES, gaps=st.lists(st.integers(0, 9), min_size=30, max_size=30), chunk_bytes=st.integers(1, 64))
def test_cuts_depend_on_lengths_alone(sizes: list[int], gaps: list[int], chunk_bytes: int) -> None:
    starts = list(accumulate([size + gap for size, gap in zip(sizes, gaps, strict=False)], initial=0))
    here = cut([Piece(start, size) for start, size in zip(starts, sizes, strict=False)], chunk_bytes)
    there = cut([Piece(0, size) for size in sizes], chunk_bytes)
    assert [[p.nbytes for p in chunk] for chunk in here] == [[p.nbytes for p in chunk] for chunk in there]
    assert all(sum(p.nbytes for p in chunk) == chunk_bytes for chunk in here[:-1])
    bytes_of = [at for chunk in here for piece in chunk for at in range(piece.start, piece.start + piece.nbytes)]
    wanted = [at for start, size in zip(starts, sizes, strict=False) for at in range(start, start + size)]
    assert bytes_of == wanted


def test_a_chunk_has_no_more_pieces_than_the_system_takes() -> None:
    chunks = cut([Piece(2 * n, 1) for n in range(2 * PIECES_MAX + 1)])
    assert [len(chunk) for chunk in chunks] == [PIECES_MAX, PIECES_MAX, 1]


def test_views_are_the_memory_itself() -> None:
    region = np.arange(10, dtype=np.uint8)
    (first, second) = views(region, [Piece(6, 2), Piece(1, 3)])
    assert (bytes(first), bytes(second)) == (b"\x06\x07", b"\x01\x02\x03")
    second[0] = 99
    assert region[1] == 99


def test_pieces_lie_within_a_region_or_not() -> None:
    region = np.zeros(10, np.uint8)
    assert within(region, [Piece(0, 10), Piece(9, 1)])
    for piece in (Piece(0, 11), Piece(9, 2), Piece(10, 1), Piece(-1, 2), Piece(3, 0), Piece(2**64 - 1, 2)):
        assert not within(region, [Piece(0, 1), piece])
