"""The machines that a market's instances live on, their memory, and its accounts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aegis.config.config import Config
from aegis.config.sizes import format_size
from aegis.core.clock import Clock
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId
from aegis.device.open_device import create_pool
from aegis.device.protocol import PhysicalPool
from aegis.node.devices import Devices
from aegis.node.image_cache import ImageCache
from aegis.node.image_caches import ImageCaches
from aegis.node.kv_fetches import Fetching
from aegis.node.local_machine import LocalHost, LocalMachine
from aegis.node.machine import InstanceHosts
from aegis.node.sizing import host_slabs_of
from aegis.process.forked_processes import ForkServer
from aegis.transport.addresses import Wires
from memory.machines_kv import MachinesKv


@dataclass(frozen=True, slots=True)
class MarketMachines:
    """`fetching` is how KV gets from one machine to another, where there are others."""

    devices: Devices
    images: ImageCaches
    hosts: MachinesKv
    instance_hosts: InstanceHosts
    wires: Wires
    fetching: Fetching | None = None


@asynccontextmanager
async def open_local_machines(
    config: Config, placement: Mapping[InstanceId, int], directory: str, clock: Clock, fork_server: ForkServer
) -> AsyncIterator[MarketMachines]:
    """All on this machine. `placement` says which device each instance is on."""
    ranks = config.instances.tensor_parallel_size
    machine = LocalMachine(
        host_kv_bytes=host_slabs_of(config) * config.memory.slab,
        cache_bytes=config.memory.cache_bytes,
        ranks=ranks,
        instances=len(placement),
        rendezvous=f"{directory}/",
        fork_server=fork_server,
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

    images, hosts = ImageCaches(), MachinesKv(config.memory.slab)
    images.open(machine.id, ImageCache(machine.filler, check_laws=config.memory.debug))
    hosts.open(machine.id, host_slabs_of(config))
    try:
        yield MarketMachines(devices, images, hosts, LocalHost(machine, devices, open_more), Wires(directory))
    finally:
        await devices.close()  # pages that are being wiped are still granted to instances that wait
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
