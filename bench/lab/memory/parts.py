"""The parts of `aegis lab memory`: what each measures, and which of its figures have to be what."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from bench.common.figures import Figure, at_least, at_most
from bench.lab.memory.churn import Churn, churn
from bench.lab.memory.fragmentation import Fragmentation, fragmentation
from bench.lab.memory.page_mapping import (
    FirstTouch,
    Mapping,
    Reserving,
    Wiping,
    first_touch,
    mappings,
    reserving,
    wiping,
)
from bench.lab.memory.page_transfer import Handing, handing
from bench.lab.memory.page_transfer_live import LiveHanding, handing_live
from bench.lab.memory.sharing import Sharing, sharing
from bench.lab.memory.slab_replay import MARKET_SHAPES, Load, Waste, replay
from bench.lab.memory.swap_in import Arrivals, arrivals
from bench.lab.memory.swap_out import Swap, swaps

_NS_PER_MS = 1e6
_NS_PER_US = 1e3
_ENOUGH_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Part:
    """`figures` takes what `measure` returned."""

    title: str
    measure: Callable[[], tuple[Struct, ...]]
    figures: Callable[..., list[Figure]]


class Mappings(Struct, frozen=True):
    """`batches`: several sizes, the last two the largest, in a row and scattered."""

    batches: tuple[Mapping, ...]


class Swaps(Struct, frozen=True):
    swaps: tuple[Swap, ...]


def _pages() -> tuple[Mappings, Reserving, FirstTouch, Wiping]:
    return Mappings(mappings()), reserving(1 << 40), first_touch(), wiping()


def _page_figures(mapped: Mappings, reserved: Reserving, touched: FirstTouch, wiped: Wiping) -> list[Figure]:
    *_, together, scattered = mapped.batches
    found = []
    for each, how in ((together, "in a row"), (scattered, "scattered")):
        name = f"map and unmap 2 MiB, recycled, {each.batch} {how}"
        found.append(at_most(name, (each.map_ns + each.unmap_ns) / _NS_PER_US, "µs", 220))
        found.append(Figure("the same system calls alone", each.calls_ns / _NS_PER_US, "µs"))
        found.append(at_most(f"overhead over the system calls, {each.batch} {how}", 100 * each.overhead, "%", 25))
    found.append(Figure("mmap, populated, and munmap of 2 MiB", together.plain_ns / _NS_PER_US, "µs"))
    found.append(at_most("reserve 1 TiB of addresses", reserved.reserve_ns / _NS_PER_MS, "ms", 1))
    found.append(Figure("first touch of 2 MiB, memory taken ahead", touched.ahead_ns / _NS_PER_US, "µs"))
    found.append(Figure("first touch of 2 MiB, memory not taken", touched.bare_ns / _NS_PER_US, "µs"))
    return [*found, Figure("wipe 2 MiB", wiped.stream_ns / _NS_PER_US, "µs")]


def _handing_figures(bare: Handing, live: LiveHanding) -> list[Figure]:
    mib = f"{live.nbytes >> 20} MiB"
    return [
        Figure(f"{mib} from process to process", bare.total_ns / _NS_PER_MS, "ms"),
        at_most(f"{mib} from one serving instance to another", live.total_ns / _NS_PER_MS, "ms", 60),
        Figure("of which until it was given back", live.given_ns / _NS_PER_MS, "ms"),
        Figure("the first time, page tables to be filled", live.first_ns / _NS_PER_MS, "ms"),
        Figure("usual gap between two tokens", live.usual_gap_ns / _NS_PER_MS, "ms"),
        at_most("latest token of any stream meanwhile, median", live.late_ns / _NS_PER_MS, "ms", 60),
        Figure("latest token of any stream meanwhile, worst", live.late_max_ns / _NS_PER_MS, "ms"),
        Figure("latest token of any stream otherwise, worst", live.late_otherwise_ns / _NS_PER_MS, "ms"),
    ]


def _swap_figures(measured: Swaps, arrived: Arrivals) -> list[Figure]:
    large = [swap for swap in measured.swaps if swap.blocks >= _ENOUGH_BLOCKS]
    found = []
    for way, ratios in (("out", [s.out_ratio for s in large]), ("in", [s.in_ratio for s in large])):
        what = f"swap-{way} of {_ENOUGH_BLOCKS} blocks or more ÷ memcpy"
        found.append(at_least(f"{what}, worst", min(ratios), "", 0.9))
        found.append(Figure(f"{what}, median", statistics.median(ratios), ""))
    name = f"of {arrived.requests} requests, KV arrived when the first step began"
    return [
        *found,
        at_most(name, arrived.arrived_at_first_step, "", arrived.requests - 1),
        Figure("first step after the command", arrived.first_step_ns / _NS_PER_MS, "ms"),
        Figure("last arrival after the command", arrived.last_arrival_ns / _NS_PER_MS, "ms"),
    ]


def _fragmentations() -> tuple[Fragmentation, Waste, Waste]:
    whole = Load()
    return fragmentation(), replay(MARKET_SHAPES, whole), replay(MARKET_SHAPES, whole, compacting=False)


def _fragmentation_figures(live: Fragmentation, replayed: Waste, loose: Waste) -> list[Figure]:
    return [
        at_most(f"demo market under {live.clients} clients, slabs", 100 * live.waste.shared, "%", 10),
        at_least("the same, one fixed pool per shape", 100 * live.waste.fixed, "%", 40),
        at_most("requests failed", live.failed, "", 0),
        Figure("slabs held, on average", live.waste.held_bytes / (1 << 20), "MiB"),
        at_most("books alone, shapes of 0.5B to 14B, slabs", 100 * replayed.shared, "%", 10),
        at_least("the same, one fixed pool per shape", 100 * replayed.fixed, "%", 40),
        Figure("the same, holes not closed", 100 * loose.shared, "%"),
    ]


def _sharing_figures(measured: Sharing) -> list[Figure]:
    shared, apart, halves = measured.shared, measured.apart, measured.halves
    return [
        at_least("throughput on one device of M ÷ on two of M each", shared.ratio, "", 0.95),
        Figure("throughput on two devices of M / 2 each ÷ on two of M each", halves.ratio, ""),
        at_most("requests failed, one device of M", shared.failed, "", 0),
        Figure("most that one instance held of it", 100 * shared.peak, "%"),
        Figure("M", measured.device_bytes / (1 << 20), "MiB"),
        Figure("throughput on two devices of M each", apart.tokens_per_s, "tokens/s"),
    ]


def _churn_figures(measured: Churn) -> list[Figure]:
    return [
        at_least("preemptions", measured.preemptions, "", 10_000),
        at_least("balloon moves that gave pages back", measured.moves, "", 10_000),
        Figure("commands that could not be done in time", measured.refused, ""),
        Figure("memory moved", measured.given_bytes / (1 << 30), "GiB"),
        at_most("processes ended by a broken law", measured.restarts, "", 0),
        at_most("requests failed", measured.failed, "", 0),
        at_most("resident memory, change from first to last", 100 * abs(measured.resident_change), "%", 2),
        Figure("resident memory, farthest from its median", 100 * measured.resident_spread, "%"),
        Figure("resident memory", measured.resident_bytes / (1 << 20), "MiB"),
    ]


PARTS: dict[str, Part] = {
    "pages": Part("Mapping physical memory", _pages, _page_figures),
    "handing": Part("Handing memory over", lambda: (handing(), handing_live()), _handing_figures),
    "swaps": Part("Swapping KV", lambda: (Swaps(swaps()), arrivals()), _swap_figures),
    "fragmentation": Part("Slab fragmentation", _fragmentations, _fragmentation_figures),
    "sharing": Part("One device for two loads that peak in turn", lambda: (sharing(),), _sharing_figures),
    "churn": Part("Preemptions and balloon moves", lambda: (churn(),), _churn_figures),
}
