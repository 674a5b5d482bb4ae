"""Copies of blocks become copies of exactly their bytes, in as few pieces as slabs allow."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.block_runs import paired, runs_of
from aegis.device.block_copies import block_copies

SLAB_BYTES = 64


def spread(copies: list[tuple[int, int, int]]) -> dict[int, int]:
    """The source of every byte that is written."""
    return {to + k: at + k for to, at, nbytes in copies for k in range(nbytes)}


@given(st.data(), st.integers(5, SLAB_BYTES))
def test_every_byte_of_every_block_moves_and_no_other(data: st.DataObject, block_bytes: int) -> None:
    per_slab = SLAB_BYTES // block_bytes
    blocks = st.lists(st.integers(0, 4 * per_slab - 1), unique=True) | st.permutations(range(4 * per_slab))
    pairs = list(zip(data.draw(blocks), data.draw(blocks), strict=False))

    def address(base: int, block: int) -> int:
        return base + block // per_slab * SLAB_BYTES + block % per_slab * block_bytes

    runs = paired(runs_of(a for a, _ in pairs), runs_of(b for _, b in pairs))
    copies = block_copies(runs, slab_bytes=SLAB_BYTES, block_bytes=block_bytes, source=1000, target=5000)
    assert spread(copies) == spread([(address(5000, b), address(1000, a), block_bytes) for a, b in pairs])
    assert all((to + n, at + n) != (to_2, at_2) for (to, at, n), (to_2, at_2, _) in pairwise(copies)), "could be one"


def test_a_run_through_slabs_is_one_piece_where_blocks_fill_them() -> None:
    assert block_copies([(3, 13, 5)], slab_bytes=64, block_bytes=16, source=0, target=0) == [(13 * 16, 3 * 16, 5 * 16)]


def test_a_tail_of_a_slab_is_not_copied() -> None:
    copies = block_copies([(0, 0, 4)], slab_bytes=64, block_bytes=20, source=0, target=100)
    assert copies == [(100, 0, 60), (164, 64, 20)], "three to a slab, and 4 bytes"


def test_nor_is_it_where_only_the_target_goes_on_in_another_slab() -> None:
    copies = block_copies([(0, 1, 3)], slab_bytes=64, block_bytes=20, source=0, target=100)
    assert copies == [(120, 0, 40), (164, 40, 20)]
