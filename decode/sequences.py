"""Sequences of a decode or mixed instance and where their KV is: not made yet, in host slabs, arriving, on the device.

Whoever holds a `KvHandle` of another instance releases it exactly once: when the KV has arrived or is not wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from aegis.core.block_runs import Blocks, append_run, blocks_after, count_blocks, count_within, first_blocks, moved
from aegis.core.ids import BlockRun, InstanceId, ProxyId, SlabId, proxy_of
from aegis.core.messages import FromInstance, GrantSlabs, KvReleased, NeedSlabs
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import EventHandle, Job, KvHandle
from memory.ledger import Ledger
from memory.slabs import NoBlocks


class Where(Enum):
    """Of a sequence's KV. Being moved out is HOST already: a swap-in waits for the swap-out's event (rule 2)."""

    NOWHERE = "nowhere"  # it is to be prefilled here
    HOST = "host"
    ARRIVING = "arriving"
    DEVICE = "device"


class Room(Enum):
    """What became of an attempt to make room on the device."""

    NOW = "now"
    LATER = "later"  # with an event: a copy's, or an answer about host slabs
    NONE = "none"  # there was nothing to put away


class _Slabs(Enum):
    """How a request for host slabs stands."""

    NOT_ASKED = "not asked"
    ASKED = "asked"
    REFUSED = "refused"  # they come when there are some


@dataclass(slots=True)
class Counters:
    """Since the process started."""

    switches: int = 0
    preemptions: int = 0
    prefetches: int = 0
    abandoned: int = 0  # prefetches given up
    prefills: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    generated_tokens: int = 0
    swap_in_bytes: int = 0
    swap_out_bytes: int = 0
    compacted_bytes: int = 0
    given_up: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """`cached` positions of KV exist, or will once it is prefilled: so many of them it `lacks`. That of `last`, the
    latest of the `generated` tokens, is not among them."""

    job: Job
    generated: int
    last: int
    cached: int
    spec: ModelSpec
    handle: KvHandle | None  # set while another instance's slabs hold the KV
    where: Where = Where.HOST
    device: list[BlockRun] = field(default_factory=list)
    held: int = 0  # blocks on the device
    host: Blocks = ()  # our own host blocks
    arrival: EventHandle | None = None  # the swap-in under way
    saved: EventHandle | None = None  # the swap-out that filled `host`
    running: bool = False
    gone: bool = False
    prefill_ns: int = 0  # what that took
    lacks: int = field(init=False)  # none while the run under way makes them
    shape: KvShape = field(init=False)
    block_tokens: int = field(init=False)
    most_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.lacks = self.cached if self.where is Where.NOWHERE else 0
        self.shape = self.spec.manifest.kv
        self.block_tokens = self.shape.block_tokens
        self.most_blocks = self.shape.blocks_for(self.job.most_tokens)

    def blocks_now(self) -> int:
        """Blocks the next step needs."""
        return self.cached // self.block_tokens + 1

    def steps_held(self) -> int:
        """Steps for which there are blocks."""
        return self.held * self.block_tokens - self.cached

    def blocks_ahead(self, lookahead: int) -> int:
        ahead = -(-self.cached // self.block_tokens) + lookahead
        return ahead if ahead < self.most_blocks else self.most_blocks


class KvStore:
    """Moves sequences' KV between host and device, on the ledger's books."""

    def __init__(self, ledger: Ledger, counters: Counters, send: Callable[[FromInstance], None]) -> None:
        self._ledger = ledger
        self._counters = counters
        self._send = send
        self._slabs = _Slabs.NOT_ASKED
        self._arriving: deque[Sequence] = deque()  # as the stream brings them
        self._departing: list[tuple[Sequence, KvHandle, EventHandle]] = []  # dropped while arriving

    @property
    def waiting(self) -> bool:
        """Whether the node still has to answer a request for host slabs."""
        return self._slabs is _Slabs.ASKED

    def capacity(self, spec: ModelSpec) -> int:
        """Blocks the device can hold for a model while its weights are in."""
        budget = self._ledger.budget
        pages = budget.pages - budget.weight_pages(spec.manifest.image_bytes)
        return pages // budget.pages_per_slab * self._ledger.device.per_slab(spec.manifest.kv)

    def bring_in(self, sequence: Sequence, *, ahead: bool = False) -> None:
        """Starts the swap-in, perhaps `ahead` of its turn; the device must have room for `blocks_now`."""
        shape = sequence.shape
        source = sequence.handle.blocks if sequence.handle else sequence.host
        after = sequence.handle.ready if sequence.handle else sequence.saved
        device = self._ledger.device.alloc(shape, sequence.blocks_now())
        assert not isinstance(device, NoBlocks) and after is not None
        sequence.device, sequence.held = list(device), sequence.blocks_now()
        sequence.where = Where.ARRIVING
        self._arriving.append(sequence)
        count = count_blocks(source)
        sequence.arrival = self._ledger.copy_in(shape, source, first_blocks(device, count), after, ahead=ahead)
        self._counters.swap_in_bytes += shape.block_bytes * count

    def settle(self) -> None:
        """Rule 1: once its own swap-in has passed, a sequence may join a step."""
        while self._arriving:
            sequence = self._arriving[0]
            if not sequence.gone:
                assert sequence.arrival is not None
                if not self._ledger.transfers.passed(sequence.arrival):
                    break
                self._ledger.device.commit(sequence.shape, sequence.device)
                sequence.where, sequence.arrival = Where.DEVICE, None
                self._release_host(sequence)
            self._arriving.popleft()
        self._release_departed()

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
        """Frees what the next step does not need."""
        held, needed = sequence.device, sequence.blocks_now()
        if sequence.held > needed:
            sequence.device, sequence.held = list(first_blocks(held, needed)), needed
            self._ledger.device.free(sequence.shape, blocks_after(held, needed))

    def compact(self, sequences: Collection[Sequence]) -> None:
        """Closes holes in the device's slabs: empties at most one slab of each shape. No step may be under way."""
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

    def drop(self, sequence: Sequence) -> None:
        """Frees all the sequence holds; what a transfer still touches goes to the move lists (rule 3)."""
        shape, device, host = sequence.shape, self._ledger.device, self._ledger.host
        if sequence.arrival is not None:
            device.free_after(shape, sequence.device, sequence.arrival)
            if sequence.handle:
                self._departing.append((sequence, sequence.handle, sequence.arrival))
            host.free_after(shape, sequence.host, sequence.arrival)
        else:
            device.free(shape, sequence.device)
            self._release_host(sequence)
        sequence.device, sequence.held, sequence.host, sequence.handle = [], 0, (), None

    def granted(self, event: GrantSlabs) -> None:
        self._ledger.grant(event.slabs)
        self._slabs = _Slabs.REFUSED if event.refused else _Slabs.NOT_ASKED

    def surplus_slabs(self) -> tuple[SlabId, ...]:
        """What the node gets back; nothing while an answer is on its way that counts on what is here."""
        return () if self.waiting else self._ledger.surplus_slabs()

    def _release_departed(self) -> None:
        """Handles of sequences that were dropped while arriving, once nothing reads from them."""
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

    def _ask(self, slabs: int) -> Room:
        if self._slabs is _Slabs.NOT_ASKED:
            self._slabs = _Slabs.ASKED
            self._send(NeedSlabs(slabs))
        return Room.LATER

    def _release_host(self, sequence: Sequence) -> None:
        if sequence.handle:
            self._send(KvReleased(sequence.job.request, sequence.job.attempt, sequence.handle))
            sequence.handle = None
        if sequence.host:
            assert sequence.saved is not None
            if self._ledger.transfers.passed(sequence.saved):
                self._ledger.host.free(sequence.shape, sequence.host)
            else:
                self._ledger.host.free_after(sequence.shape, sequence.host, sequence.saved)
            sequence.host = ()
