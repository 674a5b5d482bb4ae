"""All books of an instance under random use: what they order is possible, and every law holds after each operation."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.block_runs import Blocks
from aegis.core.effects import (
    AbandonLoad,
    AcceptPages,
    Bind,
    CopyBlocks,
    Effect,
    LoadWeights,
    MapKv,
    MapWeights,
    RevokePages,
    Send,
    StreamName,
    Unbind,
    UnmapKv,
    UnmapWeights,
    WipePages,
)
from aegis.core.ids import ModelId, PageRun, SlabId
from aegis.core.messages import GaveBack, GrantPages, TakeBack
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import EventHandle
from memory.ledger import Ledger
from memory.pages import NoPages, Runs, count_pages
from memory.slab_pool import NoBlocks
from tests.unit.memory.books import BUDGET, SLAB, SPECS, WORDS, models


def pages_of(runs: Runs) -> list[int]:
    return [page for run in runs for page in range(run.start, run.stop)]


class Bytes:
    """What would happen to bytes: pages ours or not, ranges mapped and unmapped, copies between mapped blocks, all in
    order."""

    def __init__(self) -> None:
        self.ours: set[int] = set()
        self.written: set[int] = set()  # since they were ours or wiped
        self.bound: dict[ModelId, tuple[int, int]] = {}
        self.weights: dict[ModelId, list[int]] = {}
        self.slabs: dict[SlabId, list[int]] = {}
        self.copies: list[tuple[StreamName, EventHandle, set[SlabId], ModelId | None]] = []
        self.wiping: dict[EventHandle, list[int]] = {}
        self.abandoned: set[EventHandle] = set()
        self.said: list[object] = []

    def mapped(self) -> list[int]:
        return [page for held in (self.weights, self.slabs) for pages in held.values() for page in pages]

    def perform(self, effect: Effect) -> None:
        match effect:
            case Bind(spec, offset):
                self.bound[spec.model] = (offset, BUDGET.weight_pages(spec.manifest.image_bytes))
            case Unbind(model):
                assert model not in self.weights
                del self.bound[model]
            case Send(message):
                self.said.append(message)
            case AcceptPages() | WipePages() | RevokePages():
                self.move(effect)
            case AbandonLoad(event):
                assert event in {copy[1] for copy in self.copies}
                self.abandoned.add(event)
            case LoadWeights(_, model, event):
                assert model in self.weights
                self.copies.append((StreamName.WEIGHTS, event, set(), model))
            case CopyBlocks():
                out = effect.stream is StreamName.SWAP_OUT
                firsts = [((a if out else b), count) for a, b, count in effect.copies]
                blocks = [first + at for first, count in firsts for at in range(count)]
                device = {SlabId(block * effect.shape.block_bytes // SLAB) for block in blocks}
                assert device <= self.slabs.keys()
                self.copies.append((effect.stream, effect.event, device, None))
            case _:
                self.map(effect)

    def map(self, effect: Effect) -> None:
        match effect:
            case MapWeights(model, runs):
                assert count_pages(runs) == self.bound[model][1]
                self.weights[model] = self.claim(runs)
            case UnmapWeights(model):
                assert model not in {model for *_, model in self.copies}, "R2"
                del self.weights[model]
            case MapKv(slab, runs):
                assert count_pages(runs) == 2 and slab not in self.slabs
                self.slabs[slab] = self.claim(runs)
            case UnmapKv(slab):
                assert slab not in {slab for *_, slabs, _ in self.copies for slab in slabs}, "rule 3: under a copy"
                del self.slabs[slab]

    def claim(self, runs: Runs) -> list[int]:
        pages = pages_of(runs)
        assert set(pages) <= self.ours and not set(pages) & set(self.mapped())
        self.written |= set(pages)
        return pages

    def move(self, effect: AcceptPages | WipePages | RevokePages) -> None:
        pages = set(pages_of(effect.runs))
        assert not pages & set(self.mapped()), "V2: what leaves is in no range"
        match effect:
            case AcceptPages():
                assert not pages & self.ours
                self.ours |= pages
            case WipePages():
                assert pages <= self.ours
                self.wiping[effect.event] = sorted(pages)
                self.copies.append((StreamName.SCRUB, effect.event, set(), None))
            case RevokePages():
                assert pages <= self.ours and not pages & self.written, "wiped before it is acknowledged"
                self.ours -= pages

    def complete(self, stream: StreamName) -> EventHandle | None:
        """The oldest copy of the stream."""
        copy = next((copy for copy in self.copies if copy[0] is stream), None)
        if copy is None:
            return None
        self.copies.remove(copy)
        self.written -= set(self.wiping.pop(copy[1], []))
        return copy[1]


class Books(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(BUDGET, WORDS, address_pages=14)
        self.bytes = Bytes()
        self.pairs: list[tuple[KvShape, Blocks, Blocks]] = []  # device and host blocks, both used
        self.node = [SlabId(i) for i in range(6)]
        self.device = set(range(BUDGET.pages))  # pages that are not ours
        self.owed: TakeBack | None = None
        self.number = self.now_ns = 0

    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, BUDGET.pages - 1))
        stop = data.draw(st.integers(start + 1, BUDGET.pages))
        pages = self.device & set(range(start, stop))
        self.device -= pages
        self.ledger.balloon.granted(GrantPages(tuple(PageRun(page, page + 1) for page in sorted(pages))))

    @rule(data=st.data(), gentle=st.booleans())
    def take_back(self, data: st.DataObject, gentle: bool) -> None:
        held = self.ledger.balloon.held - self.ledger.balloon.leaving
        if not held or (self.owed and not gentle):
            return
        self.number += 1
        asked = TakeBack(self.number, data.draw(st.integers(1, held)), 10, gentle=gentle)
        self.owed = self.owed if gentle else asked
        self.ledger.balloon.take_back(asked, self.now_ns)

    @rule(ns=st.integers(0, 6))
    def settle_debts(self, ns: int) -> None:
        self.now_ns += ns
        self.ledger.balloon.settle(self.now_ns)

    @rule(spec=st.sampled_from(SPECS))
    def add(self, spec: ModelSpec) -> None:
        if spec.model not in self.ledger.specs:
            assert self.ledger.add_model(spec) == (spec.model in self.ledger.specs)

    @rule(model=models)
    def drop(self, model: ModelId) -> None:
        if model in self.ledger.specs and not self.ledger.weights.is_loading(model):
            self.ledger.drop_model(model)

    @rule(model=models, expendable=st.lists(models, unique=True), spare=st.integers(0, 2))
    def load(self, model: ModelId, expendable: list[ModelId], spare: int) -> None:
        weights, known = self.ledger.weights, self.ledger.specs
        if model in known and not weights.is_resident(model) and not weights.is_loading(model):
            before = self.ledger.pool.free
            started = self.ledger.load(model, [m for m in expendable if m in known], spare=spare)
            assert not isinstance(started, NoPages) or self.ledger.pool.free == before

    @rule(model=models)
    def abandon(self, model: ModelId) -> None:
        if model in self.ledger.specs and self.ledger.weights.is_loading(model):
            self.ledger.abandon(model)

    @rule(model=models)
    def evict(self, model: ModelId) -> None:
        if model in self.ledger.specs and self.ledger.weights.is_resident(model):
            self.ledger.evict(model)

    @rule(spec=st.sampled_from(SPECS), count=st.integers(1, 5))
    def reserve(self, spec: ModelSpec, count: int) -> None:
        """Room on both sides, or on none."""
        shape = spec.manifest.kv
        device = self.ledger.device.alloc(shape, count)
        if isinstance(device, NoBlocks):
            return
        host = self.ledger.host.alloc(shape, count)
        if isinstance(host, NoBlocks):
            self.ledger.device.free(shape, device)
            return
        self.ledger.device.commit(shape, device)
        self.ledger.host.commit(shape, host)
        self.pairs.append((shape, device, host))

    @rule(data=st.data(), out=st.booleans())
    def copy(self, data: st.DataObject, out: bool) -> None:
        """From one side to the other; both sides' blocks are given up once the copy has passed."""
        if not self.pairs:
            return
        shape, device, host = self.pairs.pop(data.draw(st.integers(0, len(self.pairs) - 1)))
        if out:
            event = self.ledger.copy_out(shape, device, host)
        else:
            event = self.ledger.copy_in(shape, host, device, EventHandle(99, 1))
        self.ledger.device.free_after(shape, device, event)
        self.ledger.host.free_after(shape, host, event)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.pairs:
            shape, device, host = self.pairs.pop(data.draw(st.integers(0, len(self.pairs) - 1)))
            self.ledger.device.free(shape, device)
            self.ledger.host.free(shape, host)

    @rule(stream=st.sampled_from(list(StreamName)))
    def progress(self, stream: StreamName) -> None:
        self.settle()
        loading = dict(self.ledger.weights.loading())
        event = self.bytes.complete(stream)
        if event:
            self.ledger.progress(stream, event.value)
            weights = self.ledger.weights
            assert dict(weights.loading()) == {m: e for m, e in loading.items() if e != event}
            for model in (m for m, e in loading.items() if e == event):
                assert weights.is_resident(model) == (event not in self.bytes.abandoned)

    @rule(count=st.integers(1, 4))
    def grant(self, count: int) -> None:
        slabs, self.node = self.node[:count], self.node[count:]
        self.ledger.grant(slabs)

    @rule(keep=st.integers(0, 2))
    def give_back(self, keep: int) -> None:
        idle = self.ledger.accounts()["host_slabs_idle"]
        surplus = self.ledger.surplus_slabs(keep=keep)
        assert len(surplus) == max(idle - keep, 0)
        self.node += surplus

    def settle(self) -> None:
        for effect in self.ledger.drain():
            self.bytes.perform(effect)
        for answer in self.bytes.said:
            if isinstance(answer, GaveBack):
                self.device |= set(pages_of(answer.runs))
                self.owed = None if self.owed and self.owed.number == answer.number else self.owed
        self.bytes.said.clear()

    @invariant()
    def laws_m1_m2_m3_and_those_of_every_part(self) -> None:
        self.ledger.check()

    @invariant()
    def free_reserved_used_and_in_transfer_make_the_capacity(self) -> None:
        self.settle()
        a = self.ledger.accounts()
        pages = ("free", "weights", "loading", "kv", "retired", "leaving")
        assert sum(a[f"device_pages_{name}"] for name in pages) == a["device_pages"] == len(self.bytes.ours)
        assert self.device == set(range(BUDGET.pages)) - self.bytes.ours
        assert a["address_pages_placed"] == sum(pages for _, pages in self.bytes.bound.values())
        for pool in (self.ledger.device, self.ledger.host):
            for shape, use in pool.use().items():
                assert use.free + use.reserved + use.used + use.moving == use.slabs * (SLAB // shape.block_bytes)
        held = sum(use.slabs for use in self.ledger.host.use().values())
        assert held + a["host_slabs_idle"] == a["host_slabs_leased"] == 6 - len(self.node)
        assert a["transfers_in_flight"] == len(self.bytes.copies)

    @invariant()
    def what_is_told_of_shapes_is_what_they_use(self) -> None:
        told = {(use.region, use.block_bytes): use for use in self.ledger.shapes()}
        for region, pool in (("device", self.ledger.device), ("host", self.ledger.host)):
            for shape, use in pool.use().items():
                said = told.pop((region, shape.block_bytes))
                blocks = (said.free_blocks, said.reserved_blocks, said.used_blocks, said.moving_blocks)
                assert (said.slabs, *blocks) == (use.slabs, use.free, use.reserved, use.used, use.moving)
                assert set(said.models) == {s.model for s in self.ledger.specs.values() if s.manifest.kv == shape}
        assert not told

    @invariant()
    def what_is_counted_is_what_was_ordered(self) -> None:
        self.settle()
        assert len(set(self.bytes.mapped())) == len(self.bytes.mapped()) == self.ledger.pool.used
        weights = self.ledger.weights
        assert self.bytes.weights.keys() == {*weights.resident(), *(m for m, _ in weights.loading())}
        assert self.bytes.bound.keys() == self.ledger.specs.keys()


Books.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestBooks = Books.TestCase
