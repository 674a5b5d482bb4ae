"""A report says what the books say, and its sums are right."""

from __future__ import annotations

import pytest

from aegis.core.ids import InstanceId, MachineId, ModelId
from aegis.core.messages import NeedPages, NeedSlabs, SlabsOfShape, Telemetry
from aegis.core.model import IMAGE_EXTENT_BYTES
from aegis.telemetry.memory_report import fragmentation, report_device, report_host_kv, report_model_cache
from memory.image_cache import ModelCache
from memory.machines_kv import MachinesKv
from memory.page_arbiter import PageArbiter, WipeLost

A, B, C = (InstanceId(name) for name in "abc")
HERE, THERE = MachineId("here"), MachineId("there")
K, L = ModelId("k"), ModelId("l")
PAGE = 100
SLAB = 1000


def slabs(region: str, model: ModelId, block_bytes: int, used: int, free: int, *, count: int = 1) -> SlabsOfShape:
    return SlabsOfShape(
        region,
        (model,),
        slab_bytes=SLAB,
        block_bytes=block_bytes,
        slabs=count,
        free_blocks=free,
        reserved_blocks=0,
        used_blocks=used,
        moving_blocks=0,
    )


def arbiter() -> PageArbiter:
    books = PageArbiter(20, floor=2, idle_ns=1, patience_ns=1, quantum=1)
    for instance in (C, B, A):
        books.join(instance)
    for instance, pages in ((A, 5), (B, 3), (C, 4)):
        books.ask(instance, NeedPages(pages, urgent=False))
    return books


def test_a_device_is_told_with_all_that_is_on_it() -> None:
    books = arbiter()
    books.set_limit(A, 7, command=1, patience_ns=1)
    books.ask(B, NeedPages(19, urgent=False))
    books.seen(B, busy=False, now_ns=0)
    (wipe,) = [effect for effect in books.lost(C) if isinstance(effect, WipeLost)]
    assert sum(run.pages for run in wipe.runs) == 4
    accounts = {
        "device_pages_weights": 2,
        "device_pages_loading": 1,
        "device_pages_kv": 1,
        "device_pages_free": 1,
        "address_pages_reserved": 1000,
        "address_pages_placed": 30,
        "address_pages_kv": 20,
        "transfers_in_flight": 3,
        "transfers_in_flight_weights": 1,
        "transfers_in_flight_swap_in": 2,
    }
    said = Telemetry(K, (K,), 0, 1, {}, accounts, loading=(L,), shapes=(slabs("device", K, 300, 1, 2),))
    device = report_device(0, books, {A: said}, {K: 170, L: 90}, page_bytes=PAGE)
    assert (device.capacity_bytes, device.free_bytes, device.wiping_bytes, device.floor_bytes) == (2000, 800, 400, 200)
    a, b = device.instances
    assert (a.instance, a.held_bytes, a.limit_bytes, a.wish_bytes, a.idle) == (A, 500, 700, 0, False)
    assert (b.instance, b.held_bytes, b.limit_bytes, b.wish_bytes, b.idle) == (B, 300, None, 1900, True)
    assert (a.weights_bytes, a.kv_bytes, a.unused_bytes, a.returning_bytes) == (300, 100, 100, 0)
    assert (a.ranges.weights_reserved_bytes, a.ranges.weights_placed_bytes) == (100_000, 3000)
    assert [(w.model, w.state, w.nbytes) for w in a.ranges.weights] == [(K, "resident", 170), (L, "loading", 90)]
    assert a.transfers_in_flight == {"weights": 1, "swap_in": 2}
    assert b.weights_bytes == 0 and b.ranges.weights == ()


def test_slabs_of_one_shape_are_told_as_one_whoever_holds_them() -> None:
    a = Telemetry(None, (), 0, 0, {}, {}, shapes=(slabs("device", K, 300, 2, 1), slabs("host", L, 500, 1, 1)))
    b = Telemetry(None, (), 0, 0, {}, {}, shapes=(slabs("device", K, 300, 4, 2, count=2),))
    device = report_device(0, arbiter(), {A: a, B: b}, {}, page_bytes=PAGE)
    (shape,) = device.slabs.shapes
    assert (shape.models, shape.slabs, shape.free_blocks, shape.used_blocks) == ((K,), 3, 3, 6)
    assert shape.fragmentation == device.slabs.fragmentation == 1 - 1800 / 3000
    assert device.slabs.held_bytes == 3 * SLAB


@pytest.mark.parametrize(("used", "free", "share"), [(3, 0, 0.1), (1, 2, 0.7)])
def test_waste_is_free_blocks_and_the_end_of_a_slab(used: int, free: int, share: float) -> None:
    assert fragmentation([slabs("device", K, 300, used, free)]) == pytest.approx(share)


def test_nothing_held_is_nothing_wasted() -> None:
    assert fragmentation([]) == 0


def test_host_kv_is_free_leased_or_orphaned() -> None:
    hosts = MachinesKv(SLAB)
    hosts.open(HERE, 6)
    hosts.open(THERE, 4)
    for instance, machine, count in ((A, HERE, 2), (B, THERE, 3)):
        hosts.join(instance, machine)
        hosts.on_message(instance, NeedSlabs(count))
    hosts.lost(B, ())
    said = Telemetry(None, (), 0, 0, {}, {}, shapes=(slabs("host", K, 500, 1, 1), slabs("device", K, 500, 2, 0)))
    host = report_host_kv(hosts, [said], slab_bytes=SLAB)
    assert (host.capacity_bytes, host.leased_bytes, host.free_bytes, host.orphaned_bytes) == (10_000, 2000, 5000, 3000)
    assert (host.slabs.held_bytes, host.slabs.fragmentation) == (SLAB, 0.5)


def test_the_model_cache_is_told_image_by_image() -> None:
    cache = ModelCache(5)
    cache.add(L, 3, pinned=True)
    cache.add(K, 3)
    cache.filled(L)
    cache.use(L, 0)
    report = report_model_cache(cache.images(), cache.accounts(), cache.counters)
    assert (report.capacity_bytes, report.used_bytes) == (5 * IMAGE_EXTENT_BYTES, 3 * IMAGE_EXTENT_BYTES)
    k, l_ = report.images
    assert (k.model, k.state, k.pinned, k.nbytes) == (K, "absent", False, 0)
    assert (l_.model, l_.state, l_.pinned, l_.nbytes) == (L, "cached", True, 3 * IMAGE_EXTENT_BYTES)
    assert report.counters["hits"] == 1
