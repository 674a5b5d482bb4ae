"""KV of sequences that have ended on an instance, offered to the node, which keeps it as long as there is room.

Offered KV stays on the device until it has been copied out, or until its room is needed: before the copy is under way
it is given up at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aegis.core.block_runs import Blocks, blocks_after, count_blocks, first_blocks
from aegis.core.ids import BlockRun
from aegis.core.messages import FromInstance, KeepKv, KvKept, OfferKv
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import EventHandle
from memory.kept_prefixes import token_bytes
from memory.ledger import Ledger


@dataclass(frozen=True, slots=True)
class _Offer:
    shape: KvShape
    blocks: Blocks


class PrefixOffers:
    """The offers of one instance, on the accounts of its ledger."""

    def __init__(self, ledger: Ledger, send: Callable[[FromInstance], None]) -> None:
        self._ledger = ledger
        self._send = send
        self._made = 0
        self._open: dict[int, _Offer] = {}  # not answered yet
        self._leaving: list[tuple[int, EventHandle]] = []  # being copied out

    @property
    def open(self) -> bool:
        """Whether blocks on the device are waiting for an answer."""
        return bool(self._open)

    def make(self, spec: ModelSpec, tokens: Sequence[int], blocks: Sequence[BlockRun]) -> None:
        """Offers the whole blocks of these tokens, whose KV is in the first of `blocks`, and frees the others."""
        shape = spec.manifest.kv
        count = len(tokens) // shape.block_tokens
        self._ledger.device.free(shape, blocks_after(blocks, count))
        if count:
            self._made += 1
            self._open[self._made] = _Offer(shape, first_blocks(blocks, count))
            self._send(OfferKv(self._made, spec.model, token_bytes(tokens[: count * shape.block_tokens])))

    def answered(self, message: KeepKv) -> None:
        offer, count = self._open.pop(message.offer, None), count_blocks(message.blocks)
        if offer is None:
            if count:
                self._send(KvKept(message.offer, done=False))
            return
        device, shape = self._ledger.device, offer.shape
        wanted = first_blocks(blocks_after(offer.blocks, message.first), count)
        device.free(shape, first_blocks(offer.blocks, message.first))
        device.free(shape, blocks_after(offer.blocks, message.first + count))
        if count:
            event = self._ledger.copy_out(shape, wanted, message.blocks, ahead=True)
            device.free_after(shape, wanted, event)
            self._leaving.append((message.offer, event))

    def progress(self) -> None:
        """Reports KV that has been copied."""
        while self._leaving and self._ledger.transfers.passed(self._leaving[0][1]):
            offer, _ = self._leaving.pop(0)
            self._send(KvKept(offer, done=True))

    def give_up(self) -> None:
        """Frees blocks that wait for an answer."""
        for offer in self._open.values():
            self._ledger.device.free(offer.shape, offer.blocks)
        self._open.clear()
