from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import BlockId
from aegis.device.block_copies import block_copies

SLAB_BYTES = 64


def spread(copies: list[tuple[int, int, int]]) -> dict[int, int]:
    """The source of every byte that is written."""
    return {to + k: at + k for to, at, nbytes in copies for k in range(nbytes)}


@given(st.data(), st.integers(5, SLAB_BYTES))
def test_every_byte_of_every_block_moves_and_no_other(data: st.DataObject, block_bytes: int) -> None:
    per_slab = SLAB_BYTES // block_bytes
    blocks = st.lists(st.integers(0, 4 * per_slab - 1), unique=True)
    sides = [data.draw(blocks), data.draw(blocks)]
    pairs = [(BlockId(a), BlockId(b)) for a, b in zip(*sides, strict=False)]

    def address(base: int, block: int) -> int:
        return base + block // per_slab * SLAB_BYTES + block % per_slab * block_bytes

    copies = block_copies(pairs, slab_bytes=SLAB_BYTES, block_bytes=block_bytes, source=1000, target=5000)
    assert spread(copies) == spread([(address(5000, b), address(1000, a), block_bytes) for a, b in pairs])
    ends = {(to + nbytes, at + nbytes) for to, at, nbytes in copies}
    assert ends.isdisjoint({(to, at) for to, at, _ in copies}), "two copies could be one"


def test_the_order_of_blocks_does_not_matter() -> None:
    pairs = [(BlockId(k), BlockId(k + 10)) for k in (7, 3, 6, 5, 4)]
    copies = block_copies(pairs, slab_bytes=64, block_bytes=16, source=0, target=0)
    assert copies == [(13 * 16, 3 * 16, 5 * 16)]


def test_a_tail_of_a_slab_is_not_copied() -> None:
    pairs = [(BlockId(k), BlockId(k)) for k in range(4)]  # three to a slab, and 4 bytes
    copies = block_copies(pairs, slab_bytes=64, block_bytes=20, source=0, target=100)
    assert copies == [(100, 0, 60), (164, 64, 20)]
