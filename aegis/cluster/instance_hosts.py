"""The machines of a cluster on which instances are started: one is opened on each node that Ray chooses, anew when it
is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec

from aegis import __version__
from aegis.cluster.actor_messages import Opened, Opening
from aegis.cluster.image_transfer import ship
from aegis.cluster.kv_transfer import transfer_kv
from aegis.cluster.machine_actor import MachineActor, boot_id
from aegis.cluster.placement_groups import PlacementGroups
from aegis.cluster.ray_cluster import not_run_there
from aegis.cluster.remote_machine import MachineLost, RemoteMachine, RemotePool
from aegis.cluster.transfer_actor import start_transfer_actor
from aegis.config.config import Config
from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import InstanceId, MachineId
from aegis.core.messages import FetchKv
from aegis.core.model import ModelSpec
from aegis.device.protocol import PhysicalPool
from aegis.node.devices import Devices
from aegis.node.image_cache import ImageCache
from aegis.node.image_caches import ImageCaches
from aegis.node.machine import InstanceHost
from aegis.node.sizing import host_slabs_of
from aegis.process.error_lines import flattened
from aegis.telemetry.logs import log
from memory.machines_kv import MachinesKv

_logger = logging.getLogger(__name__)
_OPENED_WITHIN_S = 60.0
_ASKED_AGAIN_S = 0.25


class ClusterHosts:
    """Implements `aegis.node.machine.InstanceHosts`, and `aegis.node.kv_fetches.Fetching` between its machines."""

    def __init__(
        self,
        config: Config,
        placement: PlacementGroups,
        opening: Opening,
        devices: Devices,
        images: ImageCaches,
        hosts: MachinesKv,
        start: Callable[[MachineId, str], RemoteMachine] | None = None,
    ) -> None:
        """`opening` is what each machine is told, `start` starts the actors of one on a node."""
        self._config = config
        self._placement = placement
        self._opening = opening
        self._devices = devices
        self._images = images
        images.supply = self.supply
        self._hosts = hosts
        self._start = start or _started_on
        self._machines: dict[MachineId, RemoteMachine] = {}
        self._pools: dict[tuple[MachineId, InstanceId], list[RemotePool]] = {}
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # for each node's machine
        self._numbers = count()

    def refuse_private_bus(self) -> None:
        """Raises UserError if machines would have to reach the launcher's own broker, which is a socket on its
        disk."""
        spread = any(machine.opened.boot != boot_id() for machine in self._machines.values())
        if spread and self._config.mqtt.url is None:
            raise UserError(
                "the instances are on several machines: name a broker that all of them reach with --mqtt", param="mqtt"
            )

    async def host(self, instance: InstanceId) -> InstanceHost:
        machine, pools = await self.settle(instance)
        return InstanceHost(machine, [pool.address for pool in pools], machine.words.take())

    async def admit(self, instance: InstanceId) -> None:
        await self._placement.reserve([instance])
        try:
            await self.settle(instance)
            self.refuse_private_bus()
        except UserError:
            await self._end(instance)
            raise

    async def leave(self, instance: InstanceId) -> None:
        await self._end(instance)

    async def settle(self, instance: InstanceId) -> tuple[RemoteMachine, list[RemotePool]]:
        """The machine where Ray has placed it, open, and its devices there. Raises UserError if that cannot do with
        what it has."""
        while True:
            node, gpus = await self._placement.node(instance)
            with suppress(MachineLost):
                async with self._changing[node]:
                    machine = await self._machine(node)
                    return machine, await self._pools_of(instance, machine, gpus)
            await asyncio.sleep(_ASKED_AGAIN_S)  # Ray may not have noticed yet

    async def supply(self, spec: ModelSpec, *, renewed: bool = False) -> None:
        """Implements `aegis.node.image_caches.Supply`."""
        if renewed:
            for machine in self._machines.values():
                machine.forget_shipped(spec)
        while missing := [machine for machine in self._machines.values() if not machine.lost and not machine.has(spec)]:
            try:
                await ship(spec, missing[0], renewed=renewed)
            except MachineLost:
                continue
            except (OSError, ValueError) as error:
                raise ModelRefused(f"{spec.root}: its image cannot be sent to {missing[0].id}: {_why(error)}") from None

    async def fetch(self, wanted: FetchKv, into: MachineId) -> str:
        source, target = self._machines.get(wanted.kv.machine), self._machines.get(into)
        if source is None or source.lost or target is None:
            return "the machine that has its KV is lost"
        try:
            return await transfer_kv(wanted, source, target, slab_bytes=self._config.memory.slab)
        except Exception as error:  # noqa: BLE001 - whatever broke over there costs a request its prefill, no more
            log(_logger, logging.ERROR, "fetching KV broke", {"from": source.id, "to": target.id}, exc_info=True)
            return f"its KV did not come from {source.id} ({type(error).__name__})"

    async def close(self) -> None:
        """The instances are gone."""
        for machine in self._machines.values():
            await machine.close()
            self._images.close(machine.id)

    async def _machine(self, node: str) -> RemoteMachine:
        """The one on that node. Raises MachineLost, UserError."""
        self._forget_lost_machines()
        for machine in self._machines.values():
            if machine.node == node and not machine.lost:
                return machine
        machine = self._start(MachineId(f"machine-{next(self._numbers)}"), node)
        try:
            await self._open(machine)
            await self._provide(machine)
        except BaseException:
            machine.end()
            raise
        self._machines[machine.id] = machine
        self._images.open(machine.id, ImageCache(machine.filler, check_laws=self._config.memory.debug))
        self._hosts.open(machine.id, host_slabs_of(self._config))
        return machine

    async def _open(self, machine: RemoteMachine) -> None:
        """Raises MachineLost, UserError."""
        order = msgspec.structs.replace(self._opening, machine=machine.id)
        try:
            async with asyncio.timeout(_OPENED_WITHIN_S):
                machine.opened = msgspec.msgpack.decode(
                    await machine.call("open", msgspec.msgpack.encode(order)), type=Opened
                )
                if machine.opened.version != __version__:
                    raise UserError(
                        f"a node of the Ray cluster has aegis {machine.opened.version}, this one {__version__}; "
                        "install the same version everywhere"
                    )
                await machine.open_regions()
                await machine.compare_clocks()
        except TimeoutError:
            machine.lose(f"its actor has not started within {_OPENED_WITHIN_S:.0f} s")
            raise MachineLost(machine.id) from None
        except OSError as error:
            raise UserError(f"the memory of {machine.id} cannot be opened: {_why(error)}") from None
        except RuntimeError as error:
            raise not_run_there(error) from None

    async def _provide(self, machine: RemoteMachine) -> None:
        """All models that there are by the time it is done. Raises MachineLost, UserError."""
        while missing := [spec for spec in self._images.specs() if not machine.has(spec)]:
            for spec in missing:
                try:
                    await ship(spec, machine)
                except (OSError, ValueError) as error:
                    raise UserError(f"{spec.root}: its image cannot be sent to {machine.id}: {_why(error)}") from None

    async def _pools_of(self, instance: InstanceId, machine: RemoteMachine, gpus: Sequence[str]) -> list[RemotePool]:
        """Its devices there, opened when it comes for the first time. Raises MachineLost, UserError."""
        key = machine.id, instance
        if key not in self._pools:
            pools: list[RemotePool] = []
            for rank in range(self._opening.ranks):
                gpu = gpus[rank] if gpus else ""
                pool = await machine.open_pool(self._config.device, self._config.memory.device, gpu)
                if isinstance(pool, str):
                    for opened in pools:
                        await opened.end()
                    raise UserError(pool)
                pools.append(pool)
            self._pools[key] = pools
            placed: list[PhysicalPool] = [*pools]
            self._devices.place(instance, placed)
        return self._pools[key]

    async def _end(self, instance: InstanceId) -> None:
        """The instance is not started any more: its resources are free for others."""
        pools = [pool for key, mine in self._pools.items() if key[1] == instance for pool in mine]
        self._pools = {key: mine for key, mine in self._pools.items() if key[1] != instance}
        if self._devices.has(instance):
            await self._devices.leave(instance, with_device=True)
        for pool in pools:
            await pool.end()
        await self._placement.give_back(instance)

    def _forget_lost_machines(self) -> None:
        """Lost machines whose instances have been told of."""
        for machine in list(self._machines.values()):
            if machine.lost and not self._hosts.has_instances(machine.id):
                self._forget(machine)

    def _forget(self, machine: RemoteMachine) -> None:
        del self._machines[machine.id]
        self._images.close(machine.id)
        self._hosts.close(machine.id)
        self._pools = {key: pools for key, pools in self._pools.items() if key[0] != machine.id}


def _started_on(machine: MachineId, node: str) -> RemoteMachine:
    return RemoteMachine(machine, node, _actor_on(node), start_transfer_actor(node))


def _why(error: BaseException) -> str:
    """The error in one line, without the place in the remote code that Ray adds."""
    error = getattr(error, "cause", None) or error
    return flattened(getattr(error, "strerror", None) or error)


def _actor_on(node: str) -> Any:
    """The actor on a node, which Ray does not restart, and which ends with the launcher."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(MachineActor)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), max_restarts=0)
        .remote()
    )
