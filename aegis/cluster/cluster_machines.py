"""A market's machines in a Ray cluster, opened before its node is, and gone when it has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from aegis import __version__
from aegis.cluster.actor_messages import Opening
from aegis.cluster.instance_hosts import ClusterHosts
from aegis.cluster.placement_groups import PlacementGroups
from aegis.cluster.ray_cluster import connected
from aegis.config.config import Config
from aegis.core.clock import Clock
from aegis.core.ids import InstanceId
from aegis.node.devices import Devices
from aegis.node.image_caches import ImageCaches
from aegis.node.market_machines import MarketMachines
from aegis.node.sizing import host_slabs_of
from aegis.transport.addresses import Wires
from aegis.transport.curve_sockets import new_keys
from memory.machines_kv import MachinesKv


@asynccontextmanager
async def open_cluster_machines(
    config: Config, instances: Sequence[InstanceId], directory: str, clock: Clock
) -> AsyncIterator[MarketMachines]:
    """Every instance has devices of its own, and each machine the host memory that is configured. Raises UserError."""
    assert config.ray.address
    need = need_of(config)
    async with AsyncExitStack() as stack:
        cpus = need.get("CPU", 0) * len(instances)
        cluster = await stack.enter_async_context(connected(config.ray.address, cpus=cpus))
        placement = PlacementGroups(cluster, need)
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
        images, hosts = ImageCaches(), MachinesKv(config.memory.slab)
        instance_hosts = ClusterHosts(config, placement, _opening(config, instances), devices, images, hosts)
        stack.push_async_callback(instance_hosts.close)
        stack.push_async_callback(devices.close)
        for instance in instances:
            await instance_hosts.settle(instance)
        instance_hosts.refuse_private_bus()
        yield MarketMachines(
            devices, images, hosts, instance_hosts, Wires(directory, cluster.ip, new_keys()), instance_hosts
        )


def need_of(config: Config) -> dict[str, float]:
    """The resources that Ray reserves for an instance."""
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
        engine=config.engine,
    )
