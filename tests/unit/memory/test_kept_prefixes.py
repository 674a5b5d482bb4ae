"""The order in which kept KV leaves."""

from __future__ import annotations

from collections.abc import Iterator

from aegis.core.ids import InstanceId, SlabId
from aegis.core.messages import OfferKv
from aegis.sim.faults.fake_models import BLOCK_TOKENS, PAGE, make_spec
from memory.kept_prefixes import KeptPrefixes, token_bytes

SPEC = make_spec(0, image_pages=1, block_bytes=PAGE)  # a block fills a slab
SHAPE = SPEC.manifest.kv
WRITER = InstanceId("a")


def spelled(*blocks: int) -> tuple[int, ...]:
    return tuple(token for token in blocks for _ in range(BLOCK_TOKENS))


def keep(kept: KeptPrefixes, number: int, *blocks: int, spare: Iterator[SlabId]) -> None:
    offer = OfferKv(number, SPEC.model, token_bytes(spelled(*blocks)))
    kept.offer(WRITER, offer, "image", SHAPE, lambda: next(spare, None))
    kept.ended(WRITER, number, done=True)


def found(kept: KeptPrefixes, *blocks: int) -> int:
    """Blocks of the prompt that are kept. Asking for them is using them."""
    prefix = kept.find("image", SHAPE, (*spelled(*blocks), 9))
    return prefix.tokens // BLOCK_TOKENS if prefix else 0


def slabs(count: int = 10) -> Iterator[SlabId]:
    return map(SlabId, range(count))


def test_what_was_used_the_longest_ago_leaves_first() -> None:
    kept, spare = KeptPrefixes(PAGE), slabs()
    keep(kept, 1, 1, spare=spare)
    keep(kept, 2, 2, spare=spare)
    assert found(kept, 1) == 1
    assert len(kept.release(1)) == 1
    assert (found(kept, 1), found(kept, 2)) == (1, 0)


def test_what_was_used_the_longest_ago_makes_room_where_there_is_no_slab_to_spare() -> None:
    kept, spare = KeptPrefixes(PAGE), slabs(3)
    for number in (1, 2, 3):
        keep(kept, number, number, spare=spare)
    assert found(kept, 1) == 1
    keep(kept, 4, 4, spare=spare)
    assert [found(kept, block) for block in (1, 2, 3, 4)] == [1, 0, 1, 1]
    kept.check()


def test_the_end_of_a_prefix_leaves_before_its_beginning() -> None:
    kept, spare = KeptPrefixes(PAGE), slabs()
    keep(kept, 1, 1, 2, 3, spare=spare)
    assert found(kept, 1, 2, 3) == 3
    for left in (2, 1, 0):
        assert len(kept.release(1)) == 1
        assert found(kept, 1, 2, 3) == left


def test_of_an_image_of_which_nothing_is_kept_nothing_is_left() -> None:
    """Models come and go for as long as a server runs."""
    kept, spare = KeptPrefixes(PAGE), slabs(1)
    for number in range(3):
        offer = OfferKv(number, SPEC.model, token_bytes(spelled(number)))
        kept.offer(WRITER, offer, f"image {number}", SHAPE, lambda: next(spare, None))
        kept.check()
        kept.ended(WRITER, number, done=True)
        kept.check()
        assert len(kept._roots) == 1
    kept.release(1)
    kept.offer(WRITER, OfferKv(3, SPEC.model, token_bytes(spelled(3))), "no room", SHAPE, lambda: None)
    kept.check()
    assert not kept._roots
