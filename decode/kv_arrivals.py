"""Sequences whose KV lies on another machine: it is fetched into host slabs of this one, after which they are like any
other.

None is in a batch before its KV is here. Host blocks are taken for one sequence after the other, in the order of
adoption, so that two never hold a part each of the blocks that both need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aegis.core.block_runs import Blocks, count_blocks
from aegis.core.effects import StreamName
from aegis.core.ids import InstanceId, ModelId, ProxyId, proxy_of
from aegis.core.messages import Broken, FetchKv, FromInstance, KvFetched, KvReleased
from aegis.core.request import EventHandle, Job, KvHandle
from decode.counters import Counters
from decode.kv_swap import KvSwap
from decode.sequences import Sequence, Where
from memory.ledger import Ledger
from memory.slab_pool import NoBlocks

_NO_SLAB = "its KV is to come from another machine, and the host has no slab for it"


def unserved(job: Job) -> Broken:
    """The answer for a job whose model was dropped before it came."""
    return Broken(job.request, job.attempt, f"model '{job.served}' was removed")


@dataclass(slots=True)
class _Fetch:
    """A fetch under way into these blocks. A sequence that is `dropped` meanwhile leaves them to it."""

    sequence: Sequence
    handle: KvHandle
    blocks: Blocks


class Arrivals:
    """The arrivals of one decode instance."""

    def __init__(
        self,
        ledger: Ledger,
        kv: KvSwap,
        counters: Counters,
        send: Callable[[FromInstance], None],
        give_up: Callable[[Sequence, str], None],
    ) -> None:
        """`give_up` ends a sequence, whose `leave` follows at once, and says why."""
        self._ledger = ledger
        self._kv = kv
        self._counters = counters
        self._send = send
        self._give_up = give_up
        self._waiting: deque[Sequence] = deque()  # for host blocks
        self._fetching: dict[tuple[int, int], _Fetch] = {}
        saved_word = ledger.transfers.word(StreamName.SWAP_OUT)
        self._saved = EventHandle(saved_word, 0)  # passed: what was fetched is there

    def __bool__(self) -> bool:
        return bool(self._waiting or self._fetching)

    def models(self) -> set[ModelId]:
        """The models of sequences whose KV is abroad, or on its way here."""
        jobs = [*(fetch.sequence.job for fetch in self._fetching.values()), *(s.job for s in self._waiting)]
        return {job.model for job in jobs} | {job.served for job in jobs}

    def expect(self, sequence: Sequence) -> None:
        """The sequence was adopted."""
        self._waiting.append(sequence)

    def advance(self, *, idle: bool) -> None:
        """Fetches KV for which there are host blocks. If none are left, and this instance is `idle` and will give none
        back either, all that wait are given up, the youngest first."""
        while self._waiting:
            sequence = self._waiting[0]
            assert sequence.handle is not None
            blocks = self._ledger.host.alloc(sequence.shape, count_blocks(sequence.handle.blocks), used=True)
            if not isinstance(blocks, NoBlocks):
                self._fetch(self._waiting.popleft(), sequence.handle, blocks)
                continue
            refused = self._kv.ask_for_arrival(blocks.slabs)
            if not refused or not idle or self._fetching:
                return
            self._give_up(self._waiting[-1], _NO_SLAB)

    def fetched(self, event: KvFetched) -> Sequence | None:
        """The sequence whose KV has arrived; None if it was dropped meanwhile. A sequence whose KV did not come has no
        host blocks."""
        fetch = self._fetching.pop((event.request, event.attempt))
        sequence = fetch.sequence
        self._release(sequence, fetch.handle)
        sequence.handle = None
        if event.reason or sequence.dropped:
            self._ledger.host.free(sequence.shape, fetch.blocks)
        else:
            self._counters.fetched_bytes += sequence.shape.block_bytes * count_blocks(fetch.blocks)
            sequence.host, sequence.saved, sequence.where = fetch.blocks, self._saved, Where.HOST
        return None if sequence.dropped else sequence

    def leave(self, sequence: Sequence) -> None:
        """The sequence is `dropped`. Its KV, if it is being fetched, is freed when it has come."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            assert sequence.handle is not None
            self._release(sequence, sequence.handle)

    def reads_from(self, peer: InstanceId) -> bool:
        """Whether KV of the peer is being fetched."""
        return any(fetch.handle.owner == peer for fetch in self._fetching.values())

    def reads_for(self, proxy: ProxyId) -> bool:
        """Whether any KV is being fetched for a request of the proxy."""
        return any(proxy_of(fetch.sequence.job.request) == proxy for fetch in self._fetching.values())

    def _fetch(self, sequence: Sequence, handle: KvHandle, blocks: Blocks) -> None:
        job = sequence.job
        self._fetching[(job.request, job.attempt)] = _Fetch(sequence, handle, blocks)
        self._send(FetchKv(job.request, job.attempt, handle, blocks, sequence.shape.block_bytes))

    def _release(self, sequence: Sequence, handle: KvHandle) -> None:
        self._send(KvReleased(sequence.job.request, sequence.job.attempt, handle))
