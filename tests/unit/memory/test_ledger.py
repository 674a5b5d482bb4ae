"""The books of an instance: what an operation orders, in which order, and what it waits for."""

from __future__ import annotations

import re

import msgspec
import pytest

from aegis.core.block_runs import paired
from aegis.core.effects import (
    AbandonLoad,
    CopyBlocks,
    LoadWeights,
    MapKv,
    MapWeights,
    Send,
    StreamName,
    UnmapKv,
    UnmapWeights,
)
from aegis.core.errors import LawBroken
from aegis.core.ids import MODEL_NAME_PATTERN, ModelId, PageRun, SlabId
from aegis.core.messages import EvictImage, GrantPages, ImageCached, ImageEvicted, NeedPages
from aegis.core.model import ModelSpec
from aegis.core.request import EventHandle
from memory import slab_sources
from memory.ledger import Ledger
from memory.pages import NoPages, Runs
from memory.slab_pool import NoBlocks
from tests.unit.memory.books import BUDGET, SPECS, WORDS


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
    assert out == CopyBlocks(StreamName.SWAP_OUT, shape, paired(device, host), None, saved)
    assert into == CopyBlocks(StreamName.SWAP_IN, shape, paired(host, device), saved, back)


def test_a_model_that_finds_no_address_space_is_refused() -> None:
    ledger = Ledger(BUDGET, WORDS, address_pages=6)
    assert ledger.add_model(SPECS[2]) and not ledger.add_model(SPECS[0])
    assert list(ledger.specs) == [SPECS[2].model]


def test_pages_behind_kv_go_back_with_the_last_block_of_a_slab() -> None:
    ledger, shape = ledger_with(), SPECS[1].manifest.kv
    blocks = ledger.device.alloc(shape, 2)
    assert not isinstance(blocks, NoBlocks) and ledger.pool.free == 10
    ((start, stop),) = blocks
    ledger.device.free(shape, [(start, start + 1)])
    assert ledger.pool.free == 10
    ledger.device.free(shape, [(start + 1, stop)])
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
    ledger.on_message(ImageCached(model, extents))
    assert loaded_from(ledger, model) == extents
    ledger.on_message(EvictImage(model))
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
    ledger.on_message(ImageCached(model, (PageRun(7, 9),)))
    event = ledger.load(model, [])
    assert isinstance(event, EventHandle)
    if abandoned:
        ledger.abandon(model)
    ledger.drain()
    ledger.on_message(EvictImage(model))
    assert ledger.drain() == []
    ledger.progress(StreamName.WEIGHTS, event.value)
    assert ledger.drain()[-1] == Send(ImageEvicted(model))
    ledger.progress(StreamName.WEIGHTS, event.value)
    assert ledger.drain() == [], "answered once"


@pytest.mark.parametrize("known", [False, True])
def test_an_image_that_nobody_loads_is_let_go_of_at_once(known: bool) -> None:
    ledger = ledger_with(*SPECS[: int(known)])
    ledger.on_message(EvictImage(SPECS[0].model))
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
