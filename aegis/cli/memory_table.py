"""The output of `aegis memory`: a memory report as tables, sizes in MiB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.table import Table

from aegis.config.sizes import format_size
from aegis.telemetry.memory_report import (
    DeviceReport,
    HostKvReport,
    InstanceReport,
    MemoryReport,
    ModelCacheReport,
    SlabsReport,
)

_MIB = 1 << 20
_INSTANCES = ("instance", "state", "held", "limit", "waits for", "weights", "KV", "unused", "returning", "in flight")
_RANGES = ("address space", "for weights", "models'", "for KV", "weights in memory")
_SHAPES = ("KV slabs of", "block, KiB", "slabs", "free", "reserved", "used", "moving", "fragmentation")
_IMAGES = ("image", "state", "pinned", "size")


def tables(report: MemoryReport) -> Iterator[RenderableType]:
    """Every part under a line of its own, with an empty one between two."""
    for device in report.devices:
        yield from _device(device)
        yield ""
    yield from _host_kv(report.host_kv)
    yield ""
    yield from _model_cache(report.model_cache)


def _device(device: DeviceReport) -> Iterator[RenderableType]:
    yield (
        f"device {device.device}: {_mib(device.capacity_bytes)} MiB, {_mib(device.free_bytes)} free, "
        f"{_mib(device.wiping_bytes)} being wiped; idle instances keep {_mib(device.floor_bytes)}"
    )
    yield _table(_INSTANCES, (_instance(instance) for instance in device.instances))
    yield _table(_RANGES, (_ranges(instance) for instance in device.instances))
    yield _slabs(device.slabs)


def _instance(use: InstanceReport) -> tuple[str, ...]:
    moving = ", ".join(f"{stream} {count}" for stream, count in use.transfers_in_flight.items() if count)
    limit = "-" if use.limit_bytes is None else _mib(use.limit_bytes)
    sizes = (use.wish_bytes, use.weights_bytes, use.kv_bytes, use.unused_bytes, use.returning_bytes)
    state = "idle" if use.idle else "busy"
    return use.instance, state, _mib(use.held_bytes), limit, *map(_mib, sizes), moving or "-"


def _ranges(use: InstanceReport) -> tuple[str, ...]:
    ranges = use.ranges
    reserved = format_size(ranges.weights_reserved_bytes)
    sizes = (ranges.weights_placed_bytes, ranges.kv_reserved_bytes)
    present = (
        f"{weights.model} {_mib(weights.nbytes)}" + (" (loading)" if weights.state == "loading" else "")
        for weights in ranges.weights
    )
    return use.instance, reserved, *map(_mib, sizes), ", ".join(present) or "-"


def _host_kv(kv: HostKvReport) -> Iterator[RenderableType]:
    yield (
        f"host KV: {_mib(kv.capacity_bytes)} MiB, {_mib(kv.leased_bytes)} leased, {_mib(kv.free_bytes)} free, "
        f"{_mib(kv.orphaned_bytes)} of lost instances, {_mib(kv.kept_bytes)} kept for prompts to come"
    )
    yield _slabs(kv.slabs)


def _slabs(slabs: SlabsReport) -> RenderableType:
    rows = [
        (
            ", ".join(shape.models),
            f"{shape.block_bytes / 1024:.1f}",
            *map(str, (shape.slabs, shape.free_blocks, shape.reserved_blocks, shape.used_blocks, shape.moving_blocks)),
            f"{shape.fragmentation:.1%}",
        )
        for shape in slabs.shapes
    ]
    every = ("all", "", str(sum(shape.slabs for shape in slabs.shapes)), "", "", "", "", f"{slabs.fragmentation:.1%}")
    return _table(_SHAPES, [*rows, every]) if rows else "no KV slabs are held"


def _model_cache(cache: ModelCacheReport) -> Iterator[RenderableType]:
    counted = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in cache.counters.items())
    yield f"model cache: {_mib(cache.capacity_bytes)} MiB, {_mib(cache.used_bytes)} used; {counted}"
    rows = ((image.model, image.state, "yes" if image.pinned else "-", _mib(image.nbytes)) for image in cache.images)
    yield _table(_IMAGES, rows)


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f}".removesuffix(".0")
