"""A memory report as a person sees it."""

from __future__ import annotations

from rich.console import Console

from aegis.cli.memory_table import tables
from aegis.core.ids import InstanceId, ModelId
from aegis.telemetry.memory_report import (
    DeviceReport,
    HostKvReport,
    ImageReport,
    InstanceReport,
    MemoryReport,
    ModelCacheReport,
    RangesReport,
    ShapeReport,
    SlabsReport,
    WeightsReport,
)

MIB = 1 << 20
K, L = ModelId("k"), ModelId("l")
USE = InstanceReport(
    InstanceId("decode-0"),
    held_bytes=20 * MIB,
    limit_bytes=32 * MIB,
    wish_bytes=0,
    idle=False,
    weights_bytes=10 * MIB,
    kv_bytes=8 * MIB,
    unused_bytes=2 * MIB,
    returning_bytes=0,
    ranges=RangesReport(
        100 * MIB,
        12 * MIB,
        64 * MIB,
        (WeightsReport(K, "resident", 5 * MIB), WeightsReport(L, "loading", 3 * MIB // 2)),
    ),
    transfers_in_flight={"weights": 1, "swap_in": 0, "swap_out": 2},
)
SHAPE = ShapeReport((K,), 40 << 10, 2, 3, 0, 4, 1, 0.25)
REPORT = MemoryReport(
    (DeviceReport(0, 64 * MIB, 44 * MIB, 0, 4 * MIB, 2 * MIB, (USE,), SlabsReport(4 * MIB, 0.25, (SHAPE,))),),
    HostKvReport(16 * MIB, 2 * MIB, 14 * MIB, 0, 0, SlabsReport(0, 0.0, ())),
    ModelCacheReport(8 * MIB, 6 * MIB, (ImageReport(K, "cached", True, 6 * MIB),), {"hits": 3, "failed_fills": 0}),
)


def test_every_part_is_told_in_mib() -> None:
    console = Console(width=200, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(*tables(REPORT), sep="\n")
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert "device 0: 64 MiB, 44 free, 0 being wiped; idle instances keep 4" in lines
    assert "decode-0 busy 20 32 0 10 8 2 0 weights 1, swap_out 2" in lines
    assert "decode-0 100MiB 12 64 k 5, l 1.5 (loading)" in lines
    assert "k 40.0 2 3 0 4 1 25.0%" in lines
    assert "all 2 25.0%" in lines
    assert "host KV: 16 MiB, 2 leased, 14 free, 0 of lost instances, 0 kept for prompts to come" in lines
    assert "no KV slabs are held" in lines
    assert "model cache: 8 MiB, 6 used; 3 hits, 0 failed fills" in lines
    assert "k cached yes 6" in lines
