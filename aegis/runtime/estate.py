"""What a market's instances live on: machines, their memory, and the books of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aegis.config import Config
from aegis.core.clock import Clock
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId
from aegis.device.base import PhysicalPool
from aegis.device.open import create_pool
from aegis.runtime.devices import Devices
from aegis.runtime.fetches import Fetching
from aegis.runtime.image_cache import ImageCache
from aegis.runtime.image_caches import ImageCaches
from aegis.runtime.machine import Homes
from aegis.runtime.near_machine import NearMachine, OneHome
from aegis.runtime.sizes import host_slabs_of
from aegis.runtime.wires import Wires
from aegis.sizes import format_size
from memory.hosts import Hosts


@dataclass(frozen=True, slots=True)
class Estate:
    """`fetching` is how KV gets from one machine to another, where there are others."""

    devices: Devices
    images: ImageCaches
    hosts: Hosts
    homes: Homes
    wires: Wires
    fetching: Fetching | None = None


@asynccontextmanager
async def near_estate(
    config: Config, placement: Mapping[InstanceId, int], directory: str, clock: Clock
) -> AsyncIterator[Estate]:
    """All on this machine. `placement` says which device each instance is on."""
    ranks = config.instances.tensor_parallel_size
    machine = NearMachine(
        host_kv_bytes=host_slabs_of(config) * config.memory.slab,
        cache_bytes=config.memory.cache_bytes,
        ranks=ranks,
        instances=len(placement),
        meeting=f"{directory}/",
    )
    devices = Devices(
        _pools(config, range(config.device_count * ranks)),
        placement,
        clock,
        floor_bytes=config.memory.floor,
        idle_s=config.memory.idle_s,
        ranks=ranks,
        check_laws=config.memory.debug,
    )

    def open_more() -> list[PhysicalPool]:
        """Instances were too few for all devices at the start."""
        opened = len(devices.arbiters()) * ranks
        return _pools(config, range(opened, opened + ranks)) if opened + ranks <= config.instances.devices else []

    images, hosts = ImageCaches(), Hosts(config.memory.slab)
    images.open(machine.id, ImageCache(machine.filler, check_laws=config.memory.debug))
    hosts.open(machine.id, host_slabs_of(config))
    try:
        yield Estate(devices, images, hosts, OneHome(machine, devices, open_more), Wires(directory))
    finally:
        await devices.close()  # what is being wiped is still granted to who waits for it
        images.close(machine.id)
        machine.close()


def _pools(config: Config, ordinals: range) -> list[PhysicalPool]:
    """All of them, or none. Raises UserError."""
    pools: list[PhysicalPool] = []
    try:
        for ordinal in ordinals:
            pools.append(create_pool(config.device, config.memory.device, ordinal=ordinal))
    except (UserError, OSError) as error:
        for pool in pools:
            pool.close()
        if isinstance(error, OSError):
            raise UserError(f"a device with {format_size(config.memory.device)}: {error.strerror}") from None
        raise
    return pools
