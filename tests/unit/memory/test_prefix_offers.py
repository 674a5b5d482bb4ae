"""KV that is offered to the node stays on the device until it is copied out, or until the room is needed."""

from __future__ import annotations

from aegis.core.block_runs import Blocks, count_blocks
from aegis.core.effects import CopyBlocks, StreamName
from aegis.core.messages import FromInstance, KeepKv, KvKept, OfferKv
from aegis.sim.faults.fake_models import BLOCK_TOKENS, PAGE, make_spec
from memory.kept_prefixes import token_bytes
from memory.ledger import Ledger
from memory.prefix_offers import PrefixOffers
from tests.sim.driven import ledger, sides

SPEC = make_spec(0, image_pages=1, block_bytes=PAGE // 8)
SHAPE = SPEC.manifest.kv
TEXT = tuple(range(3 * BLOCK_TOKENS + 5))


class OfferedSequence:
    """A sequence of four blocks has ended, and is offered."""

    def __init__(self) -> None:
        self.said: list[FromInstance] = []
        self.ledger: Ledger = ledger(8)
        self.ledger.add_model(SPEC)
        self.offers = PrefixOffers(self.ledger, self.said.append)
        blocks = self.ledger.device.alloc(SHAPE, 4, used=True)
        assert isinstance(blocks, tuple)
        self.blocks: Blocks = blocks
        self.offers.make(SPEC, TEXT, blocks)

    def on_device(self) -> int:
        use = self.ledger.device.use().get(SHAPE)
        return use.used + use.moving if use else 0

    def copied(self) -> None:
        self.ledger.progress(StreamName.SWAP_OUT, self.ledger.transfers._submitted[StreamName.SWAP_OUT])
        self.offers.progress()


def test_whole_blocks_are_offered_and_the_rest_is_free() -> None:
    offered = OfferedSequence()
    assert offered.said == [OfferKv(1, SPEC.model, token_bytes(TEXT[: 3 * BLOCK_TOKENS]))]
    assert offered.on_device() == 3 and offered.offers.open


def test_what_the_node_wants_is_copied_and_then_kept() -> None:
    offered = OfferedSequence()
    offered.offers.answered(KeepKv(1, 1, ((40, 42),)))
    (copy,) = [effect for effect in offered.ledger.drain() if isinstance(effect, CopyBlocks)]
    first, _ = offered.blocks[0]
    assert sides(copy) == (((first + 1, first + 3),), ((40, 42),)) and copy.ahead
    assert offered.on_device() == 2 and len(offered.said) == 1
    offered.copied()
    assert offered.said[1:] == [KvKept(1, done=True)] and not offered.on_device()
    offered.ledger.check()


def test_what_the_node_does_not_want_is_free_at_once() -> None:
    offered = OfferedSequence()
    offered.offers.answered(KeepKv(1, 0, ()))
    assert not offered.on_device() and not offered.offers.open and len(offered.said) == 1


def test_whoever_needs_the_room_has_it_at_once() -> None:
    offered = OfferedSequence()
    offered.offers.give_up()
    assert not offered.on_device() and not offered.offers.open
    offered.offers.answered(KeepKv(1, 0, ((40, 43),)))
    assert offered.said[1:] == [KvKept(1, done=False)] and not offered.ledger.transfers.in_flight


def test_what_fills_no_block_is_not_offered() -> None:
    offered = OfferedSequence()
    blocks = offered.ledger.device.alloc(SHAPE, 1, used=True)
    assert isinstance(blocks, tuple) and count_blocks(blocks) == 1
    offered.offers.make(SPEC, TEXT[: BLOCK_TOKENS - 1], blocks)
    assert len(offered.said) == 1 and offered.on_device() == 3
