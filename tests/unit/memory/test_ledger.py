"""All books of an instance under random use: what they order is possible, and every law holds after each operation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.effects import (
    Bind,
    CopyBlocks,
    Effect,
    LoadWeights,
    MapKv,
    MapWeights,
    StreamName,
    Unbind,
    UnmapKv,
    UnmapWeights,
)
from aegis.core.errors import LawBroken
from aegis.core.ids import BlockId, ModelId, PageId, SlabId
from aegis.core.model import KvShape
from aegis.core.request import EventHandle
from memory.budget import Budget
from memory.ledger import Ledger
from memory.pages import NoPages
from memory.slabs import NoBlocks
from tests.sim.pretended import PAGE, make_shape, make_spec

SLAB = 2 * PAGE
SPECS = [
    make_spec(i, image_pages=pages, block_bytes=block_bytes)
    for i, (pages, block_bytes) in enumerate([(2, SLAB // 8), (3, SLAB // 2), (5, SLAB), (1, SLAB // 8)])
]
BUDGET = Budget(pages=12, page_bytes=PAGE, slab_bytes=SLAB, host_slabs=6, instances=2)
WORDS = {name: i for i, name in enumerate(StreamName)}
models = st.sampled_from([spec.model for spec in SPECS])


class Bytes:
    """What would happen to bytes: ranges mapped and unmapped, copies between mapped blocks, all in order."""

    def __init__(self) -> None:
        self.bound: dict[ModelId, tuple[int, int]] = {}
        self.weights: dict[ModelId, tuple[PageId, ...]] = {}
        self.slabs: dict[SlabId, tuple[PageId, ...]] = {}
        self.copies: list[tuple[StreamName, EventHandle, set[SlabId], ModelId | None]] = []

    def mapped(self) -> list[PageId]:
        return [page for held in (self.weights, self.slabs) for pages in held.values() for page in pages]

    def perform(self, effect: Effect) -> None:
        touched = {slab for *_, slabs, _ in self.copies for slab in slabs}
        loading = {model for *_, model in self.copies}
        match effect:
            case Bind(spec, offset):
                self.bound[spec.model] = (offset, BUDGET.weight_pages(spec.manifest.image_bytes))
            case Unbind(model):
                assert model not in self.weights
                del self.bound[model]
            case MapWeights(model, pages):
                assert len(pages) == self.bound[model][1] and not set(pages) & set(self.mapped())
                self.weights[model] = pages
            case UnmapWeights(model):
                assert model not in loading, "R2"
                del self.weights[model]
            case MapKv(slab, pages):
                assert len(pages) == 2 and not set(pages) & set(self.mapped()) and slab not in self.slabs
                self.slabs[slab] = pages
            case UnmapKv(slab):
                assert slab not in touched, "rule 3: unmapped under a copy"
                del self.slabs[slab]
            case LoadWeights(model, event):
                assert model in self.weights
                self.copies.append((StreamName.WEIGHTS, event, set(), model))
            case CopyBlocks():
                out = effect.stream is StreamName.SWAP_OUT
                device = {SlabId((a if out else b) * effect.shape.block_bytes // SLAB) for a, b in effect.pairs}
                assert device <= self.slabs.keys()
                self.copies.append((effect.stream, effect.event, device, None))

    def complete(self, stream: StreamName) -> EventHandle | None:
        """The oldest copy of the stream."""
        copy = next((copy for copy in self.copies if copy[0] is stream), None)
        if copy is None:
            return None
        self.copies.remove(copy)
        return copy[1]


class Books(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(BUDGET, WORDS, address_pages=14)
        self.bytes = Bytes()
        self.pairs: list[tuple[KvShape, list[BlockId], list[BlockId]]] = []  # device and host blocks, both used
        self.node = [SlabId(i) for i in range(6)]

    @rule(spec=st.sampled_from(SPECS))
    def add(self, spec) -> None:  # type: ignore[no-untyped-def]
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
    def evict(self, model: ModelId) -> None:
        if model in self.ledger.specs and self.ledger.weights.is_resident(model):
            self.ledger.evict(model)

    @rule(spec=st.sampled_from(SPECS), count=st.integers(1, 5))
    def reserve(self, spec, count: int) -> None:  # type: ignore[no-untyped-def]
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
            assert dict(self.ledger.weights.loading()) == {m: e for m, e in loading.items() if e != event}

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

    @invariant()
    def laws_m1_m2_m3_and_those_of_every_part(self) -> None:
        self.ledger.check()

    @invariant()
    def free_reserved_used_and_in_transfer_make_the_capacity(self) -> None:
        self.settle()
        a = self.ledger.accounts()
        pages = ("device_pages_free", "device_pages_weights", "device_pages_loading", "device_pages_kv")
        assert sum(a[name] for name in pages) == a["device_pages"] == BUDGET.pages
        for pool in (self.ledger.device, self.ledger.host):
            for shape, use in pool.use().items():
                assert use.free + use.reserved + use.used + use.moving == use.slabs * (SLAB // shape.block_bytes)
        held = sum(use.slabs for use in self.ledger.host.use().values())
        assert held + a["host_slabs_idle"] == a["host_slabs_leased"] == 6 - len(self.node)
        assert a["transfers_in_flight"] == len(self.bytes.copies)

    @invariant()
    def what_is_counted_is_what_was_ordered(self) -> None:
        self.settle()
        assert len(set(self.bytes.mapped())) == len(self.bytes.mapped()) == self.ledger.pool.used
        weights = self.ledger.weights
        assert self.bytes.weights.keys() == {*weights.resident(), *(m for m, _ in weights.loading())}
        assert self.bytes.bound.keys() == self.ledger.specs.keys()


Books.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestBooks = Books.TestCase


def ledger_with(*specs) -> Ledger:  # type: ignore[no-untyped-def]
    ledger = Ledger(BUDGET, WORDS, address_pages=100)
    for spec in specs:
        ledger.add_model(spec)
    ledger.grant([SlabId(0), SlabId(1)])
    ledger.drain()
    return ledger


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


def fits(budget: Budget, image_bytes: int, shape: KvShape, tokens: int) -> bool:
    """By trying: a sequence of so many tokens beside the weights, and in what the node can lease to one instance."""
    spec = make_spec(0, image_pages=1, block_bytes=shape.block_bytes)
    ledger = Ledger(budget, WORDS, address_pages=1000)
    ledger.add_model(spec)
    if isinstance(ledger.pool.take("weights", budget.weight_pages(image_bytes)), NoPages):
        return False
    ledger.grant([SlabId(i) for i in range(budget.host_slabs - (budget.instances - 1))])
    count = shape.blocks_for(tokens)
    return not any(isinstance(pool.alloc(shape, count), NoBlocks) for pool in (ledger.device, ledger.host))


@given(
    st.integers(4, 20),
    st.integers(1, 4 * PAGE),
    st.sampled_from([SLAB // 8, SLAB // 2, SLAB]),
    st.integers(3, 12),
    st.integers(2, 3),
)
def test_the_longest_sequence_is_the_longest_that_fits(
    pages: int, image_bytes: int, block_bytes: int, host_slabs: int, instances: int
) -> None:
    budget = Budget(pages=pages, page_bytes=PAGE, slab_bytes=SLAB, host_slabs=host_slabs, instances=instances)
    shape = make_shape(block_bytes)
    limit = budget.sequence_tokens(image_bytes, shape)
    assert limit <= 0 or fits(budget, image_bytes, shape, limit)
    assert not fits(budget, image_bytes, shape, max(limit, 0) + 1)


def test_a_block_larger_than_a_slab_holds_nothing() -> None:
    assert BUDGET.sequence_tokens(PAGE, make_shape(2 * SLAB)) == 0
