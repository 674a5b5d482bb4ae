"""All memory of the node at one moment, as `/debug/memory` and `aegis memory` tell it.

What the node itself keeps books of is exact. What an instance says of itself is as old as its last `Telemetry`, which
comes a few times a second, between steps, while anything changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from msgspec import Struct

from aegis.config.sizes import format_size
from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import SlabsOfShape, Telemetry
from aegis.core.model import IMAGE_EXTENT_BYTES
from memory.image_cache import Counters, ImageUse, State
from memory.machines_kv import MachinesKv
from memory.page_arbiter import InstanceUse, PageArbiter

_STREAM = "transfers_in_flight_"
_SILENT = Telemetry(None, (), 0, 0, {}, {})


class WeightsReport(Struct, frozen=True):
    """A model's weights on an instance; `resident` or `loading`."""

    model: ModelId
    state: str
    nbytes: int


class RangesReport(Struct, frozen=True):
    """Address space of an instance. `weights_placed_bytes` of the bytes reserved for weights belong to models, each at
    its address for life. Memory is there only where a model is resident or loading, or a slab is held."""

    weights_reserved_bytes: int
    weights_placed_bytes: int
    kv_reserved_bytes: int
    weights: tuple[WeightsReport, ...]


class InstanceReport(Struct, frozen=True):
    """An instance that is up, and what it holds of its device. `limit_bytes` is None where none was set, `wish_bytes`
    what it waits for. Of `held_bytes` it has `unused_bytes` free, and `returning_bytes` are on their way back."""

    instance: InstanceId
    held_bytes: int
    limit_bytes: int | None
    wish_bytes: int
    idle: bool
    weights_bytes: int
    kv_bytes: int
    unused_bytes: int
    returning_bytes: int
    ranges: RangesReport
    transfers_in_flight: dict[str, int]  # by stream


class ShapeReport(Struct, frozen=True):
    """KV slabs of one shape. `fragmentation` is the share of their bytes that hold no block: free blocks, and the end
    of a slab where no block fits."""

    models: tuple[ModelId, ...]
    block_bytes: int
    slabs: int
    free_blocks: int
    reserved_blocks: int
    used_blocks: int
    moving_blocks: int
    fragmentation: float


class SlabsReport(Struct, frozen=True):
    """The KV slabs that instances hold in one region, all shapes together and each."""

    held_bytes: int
    fragmentation: float
    shapes: tuple[ShapeReport, ...]


class DeviceReport(Struct, frozen=True):
    """`wiping_bytes` were a lost process's and are being zeroed; `floor_bytes` are what an idle instance keeps."""

    device: int
    capacity_bytes: int
    free_bytes: int
    wiping_bytes: int
    floor_bytes: int
    page_bytes: int
    instances: tuple[InstanceReport, ...]
    slabs: SlabsReport


class HostKvReport(Struct, frozen=True):
    """`orphaned_bytes` were a lost instance's, and transfers of others may still read them; `kept_bytes` hold KV of
    requests that have ended, and are as good as free."""

    capacity_bytes: int
    leased_bytes: int
    free_bytes: int
    orphaned_bytes: int
    kept_bytes: int
    slabs: SlabsReport


class ImageReport(Struct, frozen=True):
    """A model's weight image in the model cache, of which it takes `nbytes` unless it is `absent`."""

    model: ModelId
    state: str
    pinned: bool
    nbytes: int


class ModelCacheReport(Struct, frozen=True):
    """`counters` are counted since the start."""

    capacity_bytes: int
    used_bytes: int
    images: tuple[ImageReport, ...]
    counters: dict[str, int]


class MemoryReport(Struct, frozen=True):
    devices: tuple[DeviceReport, ...]
    host_kv: HostKvReport
    model_cache: ModelCacheReport


def limit_told(report: MemoryReport, instance: str, nbytes: int) -> str:
    """What the instance may hold now that its limit is so many bytes: devices are smaller than what may be asked for,
    and give whole pages."""
    for device in report.devices:
        for each in device.instances:
            if each.instance != instance:
                continue
            if each.limit_bytes is None:
                return f"{instance} has no limit any more: its device has {format_size(device.capacity_bytes)}"
            return f"{instance} may hold {format_size(each.limit_bytes)}"
    return f"{instance} may hold {format_size(nbytes)}"  # it has ended since


def report_device(
    ordinal: int,
    arbiter: PageArbiter,
    reports: Mapping[InstanceId, Telemetry],
    image_bytes: Mapping[ModelId, int],
    *,
    page_bytes: int,
) -> DeviceReport:
    """`reports` are the last of each instance, `image_bytes` the sizes of the models' weights."""
    uses, free = arbiter.use(), arbiter.free
    instances = [
        _instance(name, use, arbiter.capacity, reports.get(name, _SILENT), image_bytes, page_bytes)
        for name, use in sorted(uses.items())
    ]
    held = sum(use.held for use in uses.values())
    return DeviceReport(
        device=ordinal,
        capacity_bytes=arbiter.capacity * page_bytes,
        free_bytes=free * page_bytes,
        wiping_bytes=(arbiter.capacity - free - held) * page_bytes,
        floor_bytes=arbiter.floor * page_bytes,
        page_bytes=page_bytes,
        instances=tuple(instances),
        slabs=_slabs("device", (reports.get(name, _SILENT) for name in uses)),
    )


def report_host_kv(hosts: MachinesKv, reports: Iterable[Telemetry], *, slab_bytes: int) -> HostKvReport:
    return HostKvReport(
        capacity_bytes=hosts.capacity * slab_bytes,
        leased_bytes=hosts.leased * slab_bytes,
        free_bytes=hosts.free * slab_bytes,
        orphaned_bytes=(hosts.capacity - hosts.leased - hosts.free - hosts.kept) * slab_bytes,
        kept_bytes=hosts.kept * slab_bytes,
        slabs=_slabs("host", reports),
    )


def report_model_cache(
    images: Mapping[ModelId, ImageUse], extents: Mapping[str, int], counters: Counters
) -> ModelCacheReport:
    """`extents` are all there are, by what they hold, as `ModelCache.accounts` says."""
    return ModelCacheReport(
        capacity_bytes=sum(extents.values()) * IMAGE_EXTENT_BYTES,
        used_bytes=(sum(extents.values()) - extents["free"]) * IMAGE_EXTENT_BYTES,
        images=tuple(
            ImageReport(
                model, use.state, use.pinned, 0 if use.state is State.ABSENT else use.extents * IMAGE_EXTENT_BYTES
            )
            for model, use in sorted(images.items())
        ),
        counters=asdict(counters),
    )


def fragmentation(slabs: Iterable[SlabsOfShape]) -> float:
    """The share of the slabs' bytes that hold no block, of all of them together; 0 where there are none."""
    held = taken = 0
    for use in slabs:
        held += use.slabs * use.slab_bytes
        taken += (use.reserved_blocks + use.used_blocks + use.moving_blocks) * use.block_bytes
    return 1 - taken / held if held else 0.0


def _instance(
    name: InstanceId,
    use: InstanceUse,
    capacity: int,
    said: Telemetry,
    image_bytes: Mapping[ModelId, int],
    page_bytes: int,
) -> InstanceReport:
    def nbytes(*accounts: str) -> int:
        return sum(said.accounts.get(account, 0) for account in accounts) * page_bytes

    weights = [(model, "resident") for model in said.resident] + [(model, "loading") for model in said.loading]
    return InstanceReport(
        instance=name,
        held_bytes=use.held * page_bytes,
        limit_bytes=use.limit * page_bytes if use.limit < capacity else None,
        wish_bytes=use.requested * page_bytes,
        idle=use.idle,
        weights_bytes=nbytes("device_pages_weights", "device_pages_loading"),
        kv_bytes=nbytes("device_pages_kv"),
        unused_bytes=nbytes("device_pages_free"),
        returning_bytes=nbytes("device_pages_retired", "device_pages_leaving"),
        ranges=RangesReport(
            weights_reserved_bytes=nbytes("address_pages_reserved"),
            weights_placed_bytes=nbytes("address_pages_placed"),
            kv_reserved_bytes=nbytes("address_pages_kv"),
            weights=tuple(WeightsReport(model, state, image_bytes.get(model, 0)) for model, state in weights),
        ),
        transfers_in_flight={
            account.removeprefix(_STREAM): count
            for account, count in said.accounts.items()
            if account.startswith(_STREAM)
        },
    )


def _slabs(region: str, reports: Iterable[Telemetry]) -> SlabsReport:
    by_shape: dict[tuple[int, tuple[ModelId, ...]], list[SlabsOfShape]] = {}
    for report in reports:
        for use in report.shapes:
            if use.region == region:
                by_shape.setdefault((use.block_bytes, use.models), []).append(use)
    every = [use for uses in by_shape.values() for use in uses]
    return SlabsReport(
        held_bytes=sum(use.slabs * use.slab_bytes for use in every),
        fragmentation=fragmentation(every),
        shapes=tuple(_shape(uses) for _, uses in sorted(by_shape.items())),
    )


def _shape(uses: Sequence[SlabsOfShape]) -> ShapeReport:
    """The slabs of one shape that several instances hold."""
    return ShapeReport(
        models=uses[0].models,
        block_bytes=uses[0].block_bytes,
        slabs=sum(use.slabs for use in uses),
        free_blocks=sum(use.free_blocks for use in uses),
        reserved_blocks=sum(use.reserved_blocks for use in uses),
        used_blocks=sum(use.used_blocks for use in uses),
        moving_blocks=sum(use.moving_blocks for use in uses),
        fragmentation=fragmentation(uses),
    )
