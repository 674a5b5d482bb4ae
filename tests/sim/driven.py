"""An instance core driven by hand: copies complete and steps end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from aegis.core.block_runs import Blocks, runs_of
from aegis.core.effects import (
    CopyBlocks,
    Effect,
    EndRun,
    LoadWeights,
    Row,
    Run,
    Send,
    StreamName,
)
from aegis.core.estimators import Hardware
from aegis.core.events import InstanceEvent, Progress, Stepped
from aegis.core.ids import InstanceId, ModelId, PageRun, RequestId, SlabId
from aegis.core.messages import AddModel, Adopt, GrantPages, GrantSlabs, NeedPages, NeedSlabs, ReturnSlabs
from aegis.core.model import ModelSpec
from aegis.core.request import EventHandle, Job, KvHandle, Sampling, Token
from aegis.core.views import PrefillOrder, RoundPolicy
from aegis.sim.faults.fake_models import PAGE
from decode.core import DecodeCore
from decode.policies.weighted_round_robin import WeightedRoundRobin
from memory.budget import Budget
from memory.ledger import Ledger
from memory.slab_leases import SlabLeases
from prefill.core import PrefillCore

PEER = InstanceId("prefill-9")
PEER_WORD = 99
WORDS = {name: i for i, name in enumerate(StreamName)}

T = TypeVar("T")
Core = TypeVar("Core", bound=PrefillCore | DecodeCore)


class Driven(Generic[Core]):
    """`effects` is all the core ever asked for, `last` what the latest event made it ask for. Each event takes 1 ms.

    A node of `slabs` host slabs answers at once; with None the test answers itself. The device has no more pages and
    refuses at once; where it is not `refusing`, the test answers itself.
    """

    def __init__(self, core: Core, specs: Sequence[ModelSpec], *, slabs: int | None) -> None:
        self.core: Core = core
        self.now_ns = 0
        self.effects: list[Effect] = []
        self.last: list[Effect] = []
        self.refusing = True
        self._leases = None if slabs is None else SlabLeases(slabs)
        if self._leases:
            self._leases.join(core.instance)
        for spec in specs:
            self.on(AddModel(spec))

    def on(self, event: InstanceEvent, *, after_ns: int = 1_000_000) -> list[Effect]:
        self.now_ns += after_ns
        self.last = self._feed(event)
        self.effects += self.last
        return self.last

    def _feed(self, event: InstanceEvent) -> list[Effect]:
        effects = self.core.on(event, self.now_ns)
        lanes = [effect.lane for effect in effects if isinstance(effect, Run)]
        assert len(set(lanes)) == len(lanes), "two runs on one lane"
        first = next((at for at, effect in enumerate(effects) if isinstance(effect, Run)), len(effects))
        assert all(isinstance(effect, Run | EndRun) for effect in effects[first:]), "runs are not the last"
        self.core.ledger.check()
        if self.refusing and self.said(NeedPages, effects):
            effects += self._feed(GrantPages((), refused=True))
        if self._leases:
            for message in self.said(ReturnSlabs, effects):
                self._leases.give_back(self.core.instance, message.slabs)
            for request in self.said(NeedSlabs, effects):
                for _, answer in self._leases.ask(self.core.instance, request.count):
                    assert isinstance(answer, GrantSlabs)
                    effects += self._feed(answer)
        return effects

    def granted(self, *slabs: int, refused: bool = False) -> list[Effect]:
        return self.on(GrantSlabs(tuple(SlabId(slab) for slab in slabs), refused=refused))

    def complete(self, stream: StreamName, copies: int | None = None) -> list[Effect]:
        """So many more copies of the stream, or all that were submitted."""
        transfers = self.core.ledger.transfers
        done, submitted = transfers._completed[stream], transfers._submitted[stream]
        assert submitted > done, f"nothing is under way on {stream}"
        return self.on(Progress(stream, submitted if copies is None else done + copies))

    def under_way(self, stream: StreamName) -> int:
        transfers = self.core.ledger.transfers
        return transfers._submitted[stream] - transfers._completed[stream]

    def runs(self, effects: Sequence[Effect] | None = None) -> list[Run]:
        """Runs of rows that decode, and of no others, among `effects`, the last ones if not given."""
        return [run for run in self.asked(Run, effects) if not run.prompts]

    def prompts(self, effects: Sequence[Effect] | None = None) -> list[Row]:
        """Rows of prompts, likewise."""
        return [row for run in self.asked(Run, effects) for row in run.prompts]

    def ran(self, token: int = 2, *, after_ns: int = 1_000_000) -> list[Effect]:
        """The run under way, of one step: each row that samples made this token."""
        made = tuple([Token(token) for row in self.asked(Run, self.effects)[-1].rows if row.samples])
        return self.on(Stepped((made,) if made else (), after_ns), after_ns=after_ns)

    def stepped(self, *tokens: int, after_ns: int = 1_000_000) -> list[Effect]:
        """One step, whatever was asked for."""
        return self.on(Stepped((tuple(Token(token) for token in tokens),), after_ns), after_ns=after_ns)

    def said(self, kind: type[T], effects: Sequence[Effect] | None = None) -> list[T]:
        """Messages of a kind among `effects`, the last ones if not given."""
        among = self.last if effects is None else effects
        return [e.message for e in among if isinstance(e, Send) and isinstance(e.message, kind)]

    def asked(self, kind: type[T], effects: Sequence[Effect] | None = None) -> list[T]:
        """Effects of a kind, likewise."""
        return [e for e in (self.last if effects is None else effects) if isinstance(e, kind)]

    @property
    def loads(self) -> list[ModelId]:
        """Models in the order in which their weights were brought in."""
        return [effect.model for effect in self.effects if isinstance(effect, LoadWeights)]

    @property
    def copies(self) -> list[CopyBlocks]:
        return [effect for effect in self.effects if isinstance(effect, CopyBlocks)]


def budget(pages: int, *, host_slabs: int = 64) -> Budget:
    return Budget(pages=pages, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=host_slabs, instances=2)


def ledger(pages: int, *, host_slabs: int = 64) -> Ledger:
    """All pages of the device are granted already."""
    books = Ledger(budget(pages, host_slabs=host_slabs), WORDS, address_pages=1000)
    books.balloon.granted(GrantPages((PageRun(0, pages),)))
    books.drain()
    return books


def prefill(
    *specs: ModelSpec, pages: int, slabs: int | None = 64, policy: PrefillOrder | None = None
) -> Driven[PrefillCore]:
    return Driven(PrefillCore(InstanceId("prefill-0"), ledger(pages), policy), specs, slabs=slabs)


def decode(
    *specs: ModelSpec, pages: int, slabs: int | None = 64, policy: RoundPolicy | None = None
) -> Driven[DecodeCore]:
    core = DecodeCore(InstanceId("decode-0"), ledger(pages), policy or WeightedRoundRobin(), Hardware())
    return Driven(core, specs, slabs=slabs)


def sides(effect: CopyBlocks) -> tuple[Blocks, Blocks]:
    """What is copied from, and to."""
    sources = [block + at for block, _, count in effect.copies for at in range(count)]
    targets = [block + at for _, block, count in effect.copies for at in range(count)]
    return runs_of(sources), runs_of(targets)


def make_job(
    request: int,
    spec: ModelSpec,
    *,
    prompt: int = 10,
    max_tokens: int = 100,
    attempt: int = 1,
    sent: tuple[int, ...] = (),
    priority: int = 0,
    arrival_ns: int = 0,
) -> Job:
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(7,))
    return Job(RequestId(request), attempt, spec.model, tuple(range(prompt)), sampling, arrival_ns, sent, priority)


def adopt(job: Job, spec: ModelSpec, *, first_block: int = 0, owner: InstanceId = PEER) -> Adopt:
    """As it follows a prefill: one token generated, KV of all that was prefilled in the owner's slabs."""
    count = spec.manifest.kv.blocks_for(job.prefill_tokens)
    blocks = ((first_block, first_block + count),)
    handle = KvHandle(owner, blocks, job.prefill_tokens, EventHandle(PEER_WORD, first_block + 1))
    return Adopt(job, (*job.sent, 1), handle)
