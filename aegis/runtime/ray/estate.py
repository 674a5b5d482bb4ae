"""A market's machines in a Ray cluster, opened before its node is, and gone when it has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from aegis import __version__
from aegis.config import Config
from aegis.core.clock import Clock
from aegis.core.ids import InstanceId
from aegis.runtime.curve_wire import new_keys
from aegis.runtime.devices import Devices
from aegis.runtime.estate import Estate
from aegis.runtime.image_caches import ImageCaches
from aegis.runtime.ray.cluster import connected
from aegis.runtime.ray.homes import FarHomes
from aegis.runtime.ray.orders import Opening
from aegis.runtime.ray.placement import Placement
from aegis.runtime.sizes import host_slabs_of
from aegis.runtime.wires import Wires
from memory.hosts import Hosts


@asynccontextmanager
async def far_estate(
    config: Config, instances: Sequence[InstanceId], directory: str, clock: Clock
) -> AsyncIterator[Estate]:
    """Every instance has devices of its own, and each machine the host memory that is configured. Raises UserError."""
    assert config.ray.address
    need = need_of(config)
    async with AsyncExitStack() as stack:
        cpus = need.get("CPU", 0) * len(instances)
        cluster = await stack.enter_async_context(connected(config.ray.address, cpus=cpus))
        placement = Placement(cluster, need)
        stack.push_async_callback(placement.release)
        await placement.reserve(instances)
        devices = Devices(
            (),
            {},
            clock,
            floor_bytes=config.memory.floor,
            idle_s=config.memory.idle_s,
            ranks=config.instances.tensor_parallel_size,
            check_laws=config.memory.debug,
        )
        images, hosts = ImageCaches(), Hosts(config.memory.slab)
        homes = FarHomes(config, placement, _opening(config, instances), devices, images, hosts)
        stack.push_async_callback(homes.close)
        stack.push_async_callback(devices.close)
        for instance in instances:
            await homes.settle(instance)
        homes.refuse_private_bus()
        yield Estate(devices, images, hosts, homes, Wires(directory, cluster.ip, new_keys()), homes)


def need_of(config: Config) -> dict[str, float]:
    """What Ray reserves for an instance."""
    ranks = config.instances.tensor_parallel_size
    return {"GPU": float(ranks)} if config.device == "cuda" else {"CPU": config.ray.cpus * ranks}


def _opening(config: Config, instances: Sequence[InstanceId]) -> Opening:
    return Opening(
        machine="",
        version=__version__,
        host_kv_bytes=host_slabs_of(config) * config.memory.slab,
        cache_bytes=config.memory.cache_bytes,
        ranks=config.instances.tensor_parallel_size,
        instances=len(instances),
    )
