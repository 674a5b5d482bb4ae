"""Moves the KV of sequences between host and device, and says where it may come from and go to.

The holder of a `KvHandle` of another instance releases it exactly once: when the KV has arrived or is not wanted.
Nobody holds kept KV of a prompt: after it was copied, the node is asked whether it was there all the time. KV of
sequences that end is offered to the node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from enum import Enum

from aegis.core.block_runs import append_run, count_blocks, count_within, cut_off, first_blocks, moved
from aegis.core.effects import StreamName
from aegis.core.ids import InstanceId, ProxyId, RequestId, SlabId, proxy_of
from aegis.core.messages import (
    CheckPrefix,
    FromInstance,
    GrantSlabs,
    KeepKv,
    KvReleased,
    NeedSlabs,
    PrefixChecked,
    Reused,
)
from aegis.core.model import ModelSpec
from aegis.core.request import EventHandle, KeptPrefix, KvHandle
from decode.counters import Counters
from decode.sequences import Room, Sequence, Where
from memory.common_prefix import common_tokens
from memory.ledger import Ledger
from memory.prefix_offers import PrefixOffers
from memory.slab_pool import NoBlocks


def most_alike(sequence: Sequence, others: Iterable[Sequence]) -> tuple[Sequence | None, int]:
    """The sequence whose KV on the device a prefill can best go on from, because it begins with the most tokens of the
    sequence, and how many these are; the sequence's last token has to be run in any case. Such are the choices of one
    request, and prompts that begin alike. None if no sequence has a whole block more in common than is reused already.
    """
    tokens, best = (*sequence.job.prompt, *sequence.job.sent)[:-1], None
    served = sequence.job.served  # specs of one model differ where deadlines were set meanwhile
    most = sequence.reused + sequence.block_tokens - 1
    for other in others:
        there = other.cached - other.lacks
        if other is sequence or other.where is not Where.DEVICE or other.job.served != served or there <= most:
            continue
        if other.job.prompt[:most] == tokens[: min(most, len(other.job.prompt))]:
            same = common_tokens(tokens, (*other.job.prompt, *other.made)[:there])
            if same > most:
                best, most = other, same
    return best, most


class _Slabs(Enum):
    """The state of a request for host slabs."""

    NOT_ASKED = "not asked"
    ASKED = "asked"
    REFUSED = "refused"  # they come when there are some
    PUT_OFF = "put off"  # so were those for an arrival: what has to leave the device asks anew


class KvSwap:
    """Moves sequences' KV between host and device, on the accounts of the ledger."""

    def __init__(
        self, ledger: Ledger, counters: Counters, send: Callable[[FromInstance], None], *, reuses: bool = False
    ) -> None:
        """If it `reuses` KV, it offers the KV of sequences that end to the node."""
        self._ledger = ledger
        self._counters = counters
        self._send = send
        self._offers = PrefixOffers(ledger, send) if reuses else None
        self._slabs = _Slabs.NOT_ASKED
        self._for_arrival = False  # they were asked for
        self._arriving: deque[Sequence] = deque()  # as the stream brings them
        self._departing: list[tuple[Sequence, KvHandle, EventHandle]] = []  # dropped while arriving
        self._checking: dict[tuple[RequestId, int], Sequence] = {}  # whether what has come was still kept

    @property
    def reuses(self) -> bool:
        return self._offers is not None

    @property
    def waiting(self) -> bool:
        """Whether the node still has to answer a request for host slabs."""
        return self._slabs is _Slabs.ASKED

    @property
    def checking(self) -> bool:
        """Whether the node still has to say whether kept KV was intact."""
        return bool(self._checking)

    def capacity(self, spec: ModelSpec) -> int:
        """The blocks that the device can hold for a model while its weights are loaded: in an equal share of its pages,
        or in what the instance has now, if that is more. Adapters have those of their base."""
        budget, spec = self._ledger.budget, self._ledger.base_of(spec)
        pages = max(budget.equal_pages, self._ledger.balloon.held) - budget.weight_pages(spec.manifest.image_bytes)
        return pages // budget.pages_per_slab * self._ledger.device.per_slab(spec.manifest.kv)

    def bring_in(self, sequence: Sequence, *, ahead: bool = False) -> None:
        """Starts the swap-in, perhaps `ahead` of its turn; the device must have room for `blocks_now`."""
        shape, source, after = sequence.shape, sequence.host, sequence.saved
        if sequence.prefix:
            source = sequence.prefix.blocks
        elif sequence.handle:
            source, after = sequence.handle.blocks, sequence.handle.ready
        device = self._ledger.device.alloc(shape, sequence.blocks_now())
        assert not isinstance(device, NoBlocks) and (sequence.prefix or after is not None)
        sequence.device, sequence.held = list(device), sequence.blocks_now()
        sequence.where, sequence.refused = Where.ARRIVING, False
        self._arriving.append(sequence)
        count = count_blocks(source)
        sequence.arrival = self._ledger.copy_in(shape, source, first_blocks(device, count), after, ahead=ahead)
        self._counters.swap_in_bytes += shape.block_bytes * count

    def progress(self, stream: StreamName) -> None:
        """Some of its copies have ended."""
        if stream is StreamName.SWAP_IN:
            self.settle()
        elif stream is StreamName.SWAP_OUT and self._offers:
            self._offers.progress()

    def settle(self) -> None:
        """Rule 1: once its own swap-in has passed, a sequence may join a step."""
        while self._arriving:
            sequence = self._arriving[0]
            if not sequence.dropped:
                assert sequence.arrival is not None
                if not self._ledger.transfers.passed(sequence.arrival):
                    break
                sequence.arrival = None
                if sequence.prefix:
                    self._ask_if_kept(sequence, sequence.prefix)
                else:
                    self._there(sequence)
                    self._release_host(sequence)
            self._arriving.popleft()
        self._release_departed()

    def _checked(self, event: PrefixChecked) -> None:
        """The sequence goes on from its prefix or, if that was gone, is prefilled from the beginning."""
        sequence = self._checking.pop((event.request, event.attempt), None)
        if sequence is None:
            return  # it has left
        sequence.prefix = None
        if event.intact:
            self._there(sequence)
            self._counters.reused_tokens += sequence.reused
            self._send(Reused(event.request, event.attempt, sequence.reused))
            return
        self._ledger.device.free(sequence.shape, sequence.device)
        sequence.device, sequence.held, sequence.where = [], 0, Where.NOWHERE
        sequence.lacks, sequence.reused = sequence.cached, 0

    def look_around(self, sequence: Sequence, others: Iterable[Sequence]) -> None:
        """Before its first run: looks for KV of other sequences on the device that it can go on from."""
        begun = sequence.lacks < sequence.cached - sequence.reused
        if self._offers and not begun and not sequence.job.is_whole:
            other, tokens = most_alike(sequence, others)
            if other:
                self._go_on_from(sequence, other, tokens)

    def follows(self, sequence: Sequence, ahead: Iterable[Sequence]) -> bool:
        """Whether the sequence, which has not begun, would rather go on from KV that these are about to make."""
        if not self._offers or sequence.job.is_whole:
            return False
        tokens, most = (*sequence.job.prompt, *sequence.job.sent)[:-1], sequence.reused + sequence.block_tokens - 1
        alikes = [other.job for other in ahead if other.job.adapter == sequence.job.adapter]
        return any([common_tokens(tokens, (*other.prompt, *other.sent)) > most for other in alikes])

    def give_up_offers(self) -> None:
        """Drops the offers that the node has not answered; their blocks leave the device at once."""
        if self._offers:
            self._offers.give_up()

    def _go_on_from(self, sequence: Sequence, other: Sequence, tokens: int) -> None:
        """Copies the other's KV of these tokens, with which both begin, to the blocks of the sequence."""
        count = sequence.shape.blocks_for(tokens)
        self._ledger.copy_within(
            sequence.shape, first_blocks(other.device, count), first_blocks(sequence.device, count)
        )
        self._counters.reused_tokens += tokens - sequence.reused
        sequence.reused, sequence.lacks = tokens, sequence.cached - tokens
        self._send(Reused(sequence.job.request, sequence.job.attempt, tokens))

    def _there(self, sequence: Sequence) -> None:
        self._ledger.device.commit(sequence.shape, sequence.device)
        sequence.where = Where.DEVICE

    def _ask_if_kept(self, sequence: Sequence, prefix: KeptPrefix) -> None:
        job = sequence.job
        self._checking[job.request, job.attempt] = sequence
        self._send(CheckPrefix(job.request, job.attempt, prefix.entry))

    def grow(self, sequence: Sequence, blocks: int) -> bool:
        shape = sequence.shape
        more = self._ledger.device.alloc(shape, blocks, used=True)
        if isinstance(more, NoBlocks):
            return False
        for start, stop in more:
            append_run(sequence.device, start, stop)
        sequence.held += blocks
        return True

    def shrink(self, sequence: Sequence) -> None:
        """Frees blocks that the next step does not need."""
        needed = sequence.blocks_now()
        if sequence.held > needed:
            self._ledger.device.free(sequence.shape, cut_off(sequence.device, sequence.held - needed))
            sequence.held = needed

    def compact(self, sequences: Collection[Sequence]) -> None:
        """Closes holes in the device's slabs: empties at most one slab of each shape. No step may be under way; while
        KV waits to be kept nothing is moved."""
        if self._offers and self._offers.open:
            return
        for shape, blocks in self._ledger.device.sparse():
            bounds, owners, owned = (blocks[0][0], blocks[-1][1]), list[Sequence](), 0
            for sequence in sequences:
                if sequence.where is Where.DEVICE and sequence.shape == shape:
                    own = count_within(sequence.device, bounds)
                    owners += [sequence] if own else []
                    owned += own
            assert owned == count_blocks(blocks), "used blocks of no sequence"
            copies = self._ledger.compact(shape, blocks)
            for sequence in owners:
                sequence.device = moved(sequence.device, copies)
            self._counters.compacted_bytes += shape.block_bytes * owned

    def loses(self, sequence: Sequence) -> bool:
        """Whether its KV would be lost if it left the device now, the host having no room for it."""
        keep = sequence.shape.blocks_for(sequence.cached - sequence.lacks)
        return self._slabs is _Slabs.REFUSED and self._ledger.host.room(sequence.shape) < keep

    def put_away(self, sequence: Sequence) -> Room:
        """Moves the KV to host slabs. NOW: the node has none to give, and the caller is to drop the sequence."""
        shape = sequence.shape
        keep = shape.blocks_for(sequence.cached - sequence.lacks)
        host = self._ledger.host.alloc(shape, keep, used=True)
        if isinstance(host, NoBlocks):
            return Room.NOW if self._slabs is _Slabs.REFUSED else self._ask(host.slabs)
        sequence.saved = self._ledger.copy_out(shape, first_blocks(sequence.device, keep), host)
        self._ledger.device.free_after(shape, sequence.device, sequence.saved)
        self._counters.swap_out_bytes += shape.block_bytes * keep
        sequence.host, sequence.device, sequence.held, sequence.where = host, [], 0, Where.HOST
        return Room.LATER

    def drop(self, sequence: Sequence, *, keep: bool = False) -> None:
        """Frees all blocks of the sequence; blocks that a transfer still touches go to the move lists (rule 3). `keep`:
        the next turn of a conversation may begin like it."""
        if keep and self._offers and sequence.where is Where.DEVICE and not sequence.job.sampling.pools:
            tokens = (*sequence.job.prompt, *sequence.made)[: sequence.cached - sequence.lacks]
            self._offers.make(sequence.spec, tokens, sequence.device)
            sequence.device, sequence.held = [], 0
            return
        shape, device, host = sequence.shape, self._ledger.device, self._ledger.host
        if sequence.arrival is not None:
            device.free_after(shape, sequence.device, sequence.arrival)
            if sequence.handle:
                self._departing.append((sequence, sequence.handle, sequence.arrival))
            host.free_after(shape, sequence.host, sequence.arrival)
        else:
            self._checking.pop((sequence.job.request, sequence.job.attempt), None)
            device.free(shape, sequence.device)
            self._release_host(sequence)
        sequence.device, sequence.held, sequence.host, sequence.handle = [], 0, (), None

    def on_message(self, event: GrantSlabs | KeepKv | PrefixChecked) -> None:
        """Takes the node's answers about host memory."""
        match event:
            case GrantSlabs():
                self._ledger.grant(event.slabs)
                refused = _Slabs.PUT_OFF if self._for_arrival else _Slabs.REFUSED
                self._slabs = refused if event.refused else _Slabs.NOT_ASKED
            case KeepKv():
                assert self._offers
                self._offers.answered(event)
            case PrefixChecked():
                self._checked(event)

    def surplus_slabs(self) -> tuple[SlabId, ...]:
        """The slabs that go back to the node; none while an answer is on its way that counts on those that are here."""
        return () if self.waiting else self._ledger.surplus_slabs()

    def _release_departed(self) -> None:
        """Releases handles of sequences that were dropped while arriving, once nothing reads from them."""
        if not self._departing:
            return
        passed = self._ledger.transfers.passed
        for sequence, handle, event in self._departing:
            if passed(event):
                self._send(KvReleased(sequence.job.request, sequence.job.attempt, handle))
        self._departing = [departing for departing in self._departing if not passed(departing[2])]

    def reads_from(self, peer: InstanceId) -> bool:
        """Whether a transfer from the peer's slabs is under way."""
        return any(handle.owner == peer for _, handle, _ in self._departing)

    def reads_for(self, proxy: ProxyId) -> bool:
        """Whether such a transfer is under way for a request of the proxy that was dropped."""
        return any(proxy_of(sequence.job.request) == proxy for sequence, _, _ in self._departing)

    def ask_for_arrival(self, slabs: int) -> bool:
        """Whether the node has refused them; else they are on their way."""
        if self._slabs is _Slabs.NOT_ASKED:
            self._ask(slabs)
            self._for_arrival = True
        return self._slabs in (_Slabs.REFUSED, _Slabs.PUT_OFF)

    def _ask(self, slabs: int) -> Room:
        if self._slabs in (_Slabs.NOT_ASKED, _Slabs.PUT_OFF):
            self._slabs, self._for_arrival = _Slabs.ASKED, False
            self._send(NeedSlabs(slabs))
        return Room.LATER

    def _release_host(self, sequence: Sequence) -> None:
        if sequence.handle:
            self._send(KvReleased(sequence.job.request, sequence.job.attempt, sequence.handle))
            sequence.handle = None
        if sequence.host:
            assert sequence.saved is not None
            self._ledger.host.free_after(sequence.shape, sequence.host, sequence.saved)
            sequence.host = ()
