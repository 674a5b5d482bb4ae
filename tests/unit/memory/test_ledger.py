"""All books of an instance under random use: what they order is possible, and every law holds after each operation."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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
from aegis.core.errors import LawBroken
from aegis.core.ids import MODEL_NAME_PATTERN, BlockId, ModelId, PageRun, SlabId
from aegis.core.messages import EvictImage, GaveBack, GrantPages, ImageCached, ImageEvicted, NeedPages, TakeBack
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import EventHandle
from memory import slab_sources
from memory.budget import Budget
from memory.ledger import Ledger
from memory.pages import NoPages, Runs, count_pages
from memory.slabs import NoBlocks
from tests.sim.pretended import PAGE, make_spec

SLAB = 2 * PAGE
SPECS = [
    make_spec(i, image_pages=pages, block_bytes=block_bytes)
    for i, (pages, block_bytes) in enumerate([(2, SLAB // 8), (3, SLAB // 2), (5, SLAB), (1, SLAB // 8)])
]
BUDGET = Budget(pages=12, page_bytes=PAGE, slab_bytes=SLAB, host_slabs=6, instances=2)
WORDS = {name: i for i, name in enumerate(StreamName)}
models = st.sampled_from([spec.model for spec in SPECS])


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
                device = {SlabId((a if out else b) * effect.shape.block_bytes // SLAB) for a, b in effect.pairs}
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
        self.pairs: list[tuple[KvShape, list[BlockId], list[BlockId]]] = []  # device and host blocks, both used
        self.node = [SlabId(i) for i in range(6)]
        self.device = set(range(BUDGET.pages))  # pages that are not ours
        self.owed: TakeBack | None = None
        self.ticket = self.now_ns = 0

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
        self.ticket += 1
        asked = TakeBack(self.ticket, data.draw(st.integers(1, held)), 10, gentle=gentle)
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
        self.pairs.append((shape, list(device), list(host)))

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
                self.owed = None if self.owed and self.owed.ticket == answer.ticket else self.owed
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


def ledger_with(*specs: ModelSpec) -> Ledger:
    ledger = Ledger(BUDGET, WORDS, address_pages=100)
    ledger.balloon.granted(GrantPages((PageRun(0, BUDGET.pages),)))
    for spec in specs:
        ledger.add_model(spec)
    ledger.grant([SlabId(0), SlabId(1)])
    ledger.drain()
    return ledger


def test_nothing_is_ours_before_it_is_granted() -> None:
    ledger = Ledger(BUDGET, WORDS, address_pages=100)
    ledger.add_model(SPECS[0])
    assert ledger.load(SPECS[0].model, []) == NoPages(2, 0)
    assert isinstance(ledger.device.alloc(SPECS[0].manifest.kv, 1), NoBlocks)


def test_effects_say_what_has_to_leave_before_what_comes() -> None:
    ledger = ledger_with(SPECS[2], SPECS[0])
    ledger.load(SPECS[2].model, [])
    ledger.progress(StreamName.WEIGHTS, 1)
    ledger.device.alloc(SPECS[0].manifest.kv, 8 * 3)
    ledger.drain()
    event = ledger.load(SPECS[0].model, [SPECS[2].model])
    assert [type(effect) for effect in ledger.drain()] == [UnmapWeights, MapWeights, LoadWeights]
    assert event == EventHandle(WORDS[StreamName.WEIGHTS], 2)


def test_rule_2_a_swap_in_waits_for_the_last_transfer_of_its_source() -> None:
    ledger, shape = ledger_with(SPECS[0]), SPECS[0].manifest.kv
    device, host = ledger.device.alloc(shape, 2), ledger.host.alloc(shape, 2)
    assert not isinstance(device, NoBlocks) and not isinstance(host, NoBlocks)
    ledger.drain()
    saved = ledger.copy_out(shape, device, host)
    back = ledger.copy_in(shape, host, device, saved)
    out, into = ledger.drain()
    assert out == CopyBlocks(StreamName.SWAP_OUT, shape, tuple(zip(device, host, strict=True)), None, saved)
    assert into == CopyBlocks(StreamName.SWAP_IN, shape, tuple(zip(host, device, strict=True)), saved, back)


def test_a_model_that_finds_no_address_space_is_refused() -> None:
    ledger = Ledger(BUDGET, WORDS, address_pages=6)
    assert ledger.add_model(SPECS[2]) and not ledger.add_model(SPECS[0])
    assert list(ledger.specs) == [SPECS[2].model]


def test_pages_behind_kv_go_back_with_the_last_block_of_a_slab() -> None:
    ledger, shape = ledger_with(), SPECS[1].manifest.kv
    blocks = ledger.device.alloc(shape, 2)
    assert not isinstance(blocks, NoBlocks) and ledger.pool.free == 10
    ledger.device.free(shape, blocks[:1])
    assert ledger.pool.free == 10
    ledger.device.free(shape, blocks[1:])
    assert ledger.pool.free == 12
    assert [type(effect) for effect in ledger.drain()] == [MapKv, UnmapKv]


@pytest.mark.parametrize("law", ["M1", "M2", "M3"])
def test_check_finds_what_is_broken(law: str) -> None:
    ledger = ledger_with(SPECS[0])
    match law:
        case "M1":
            ledger.pool.take("somebody", 1)
        case "M2":
            ledger._device_slabs.take()
        case "M3":
            ledger._leases.leased.add(SlabId(5))
    with pytest.raises(LawBroken, match=law):
        ledger.check()


# --- growing at the cost of others ------------------------------------------------------------------------------------


def test_the_device_is_asked_before_anything_is_evicted_and_once() -> None:
    ledger = Ledger(BUDGET, WORDS, address_pages=100)
    assert ledger.must_wait(3) and ledger.must_wait(4)
    assert ledger.drain() == [Send(NeedPages(3, urgent=False))]
    ledger.balloon.granted(GrantPages((), refused=True))
    assert not ledger.must_wait(3) and ledger.drain() == []


def test_what_is_free_is_not_asked_for() -> None:
    ledger = ledger_with()
    assert not ledger.must_wait(BUDGET.pages)
    assert ledger.must_wait(BUDGET.pages + 1)
    assert ledger.drain() == [Send(NeedPages(1, urgent=False))]


def test_kv_takes_so_many_pages_beside_the_blocks_it_has_room_for() -> None:
    ledger, shape = ledger_with(), SPECS[1].manifest.kv
    assert [ledger.kv_pages(shape, count) for count in (1, 2, 3)] == [2, 2, 4]
    ledger.device.alloc(shape, 1)
    assert [ledger.kv_pages(shape, count) for count in (1, 2, 3)] == [0, 2, 2]


# --- loads that are given up, and images that are evicted -------------------------------------------------------------


def test_pages_of_an_abandoned_load_come_back_with_its_event() -> None:
    ledger, model = ledger_with(SPECS[2]), SPECS[2].model
    event = ledger.load(model, [])
    assert isinstance(event, EventHandle)
    ledger.drain()
    ledger.abandon(model)
    assert ledger.drain() == [AbandonLoad(event)] and ledger.pool.free == BUDGET.pages - 5
    ledger.progress(StreamName.WEIGHTS, event.value)
    assert ledger.drain() == [UnmapWeights(model)] and ledger.pool.free == BUDGET.pages


def test_a_load_reads_from_the_cache_what_lies_there_when_it_begins() -> None:
    ledger, model, extents = ledger_with(SPECS[0]), SPECS[0].model, (PageRun(7, 9),)
    assert loaded_from(ledger, model) == ()
    ledger.told(ImageCached(model, extents))
    assert loaded_from(ledger, model) == extents
    ledger.told(EvictImage(model))
    assert loaded_from(ledger, model) == ()


def loaded_from(ledger: Ledger, model: ModelId) -> Runs:
    event = ledger.load(model, [])
    assert isinstance(event, EventHandle)
    (load,) = [effect for effect in ledger.drain() if isinstance(effect, LoadWeights)]
    ledger.progress(StreamName.WEIGHTS, event.value)
    ledger.evict(model)
    return load.cached


@pytest.mark.parametrize("abandoned", [False, True])
def test_an_image_may_be_overwritten_once_no_load_reads_it(abandoned: bool) -> None:
    """An abandoned load reads on until its event has passed."""
    ledger, model = ledger_with(SPECS[0]), SPECS[0].model
    ledger.told(ImageCached(model, (PageRun(7, 9),)))
    event = ledger.load(model, [])
    assert isinstance(event, EventHandle)
    if abandoned:
        ledger.abandon(model)
    ledger.drain()
    ledger.told(EvictImage(model))
    assert ledger.drain() == []
    ledger.progress(StreamName.WEIGHTS, event.value)
    assert ledger.drain()[-1] == Send(ImageEvicted(model))
    ledger.progress(StreamName.WEIGHTS, event.value)
    assert ledger.drain() == [], "answered once"


@pytest.mark.parametrize("known", [False, True])
def test_an_image_that_nobody_loads_is_let_go_of_at_once(known: bool) -> None:
    ledger = ledger_with(*SPECS[: int(known)])
    ledger.told(EvictImage(SPECS[0].model))
    assert ledger.drain() == [Send(ImageEvicted(SPECS[0].model))]


def test_a_model_named_like_an_owner_of_the_books_is_a_model_like_others() -> None:
    """KV's own owner has a name that no model can have."""
    assert not re.fullmatch(MODEL_NAME_PATTERN, slab_sources._KV_OWNER)
    names = [ModelId(name) for name in ("kv", "wiping", "weights", "retired")]
    ledger = ledger_with(*(msgspec.structs.replace(SPECS[3], model=name) for name in names))
    blocks = ledger.device.alloc(SPECS[3].manifest.kv, 1)
    assert not isinstance(blocks, NoBlocks)
    for name in names:
        assert isinstance(ledger.load(name, []), EventHandle)
        ledger.check()
    ledger.device.free(SPECS[3].manifest.kv, blocks)
    ledger.progress(StreamName.WEIGHTS, len(names))
    for name in names:
        ledger.drop_model(name)
        ledger.check()
    assert ledger.pool.free == BUDGET.pages
