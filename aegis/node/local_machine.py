"""The machine that this process is on: its shared memory, made here, and children of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aegis.core.ids import InstanceId, MachineId
from aegis.core.model import ModelSpec
from aegis.device.host_memory import SharedMemory
from aegis.device.protocol import PhysicalPool
from aegis.device.shared_events import SharedWords
from aegis.instance.settings import InstanceSettings
from aegis.node import instance_processes
from aegis.node.devices import Devices
from aegis.node.image_filler import ImageFiller
from aegis.node.instance_processes import Processes
from aegis.node.machine import WORDS, EventWords, InstanceHost, RankMemory
from aegis.process.forked_processes import ForkServer


class LocalMachine:
    """Implements `aegis.node.machine.Machine`. Each of the `ranks` has `host_kv_bytes`; they share `cache_bytes`, as
    the `instances` do the cores. Their processes are forked by `fork_server`."""

    clock_ahead_ns = 0

    def __init__(
        self,
        *,
        host_kv_bytes: int,
        cache_bytes: int,
        ranks: int,
        instances: int,
        rendezvous: str,
        fork_server: ForkServer,
        machine: str = "",
    ) -> None:
        self.id = MachineId(machine)
        self.rendezvous = rendezvous
        self.filler = ImageFiller(cache_bytes, ranks=ranks)
        self.words = [SharedWords.create(WORDS) for _ in range(ranks)]
        self.host_kv = [SharedMemory.create(host_kv_bytes, "kv") for _ in range(ranks)]
        self.instances = instances
        self._ranks = ranks
        self._fork_server = fork_server

    @property
    def memory(self) -> list[RankMemory]:
        parts = zip(self.words, self.host_kv, self.filler.paths, strict=True)
        return [RankMemory(words.path, kv.path, images) for words, kv, images in parts]

    def localised(self, spec: ModelSpec) -> ModelSpec:
        return spec

    def poison(self, words: Sequence[int]) -> None:
        for shared in self.words:
            for word in words:
                shared.poison(word)

    async def start(self, ranks: Sequence[InstanceSettings]) -> Processes:
        lanes = ranks[0].lanes == "2"
        environment = instance_processes.environment_for(self.instances * self._ranks, lanes=lanes)
        return await instance_processes.start(self._fork_server, ranks, environment)

    def close(self) -> None:
        """Closes what the machine has; its instances are gone, or going."""
        self.filler.close()
        for memory in self.host_kv:
            memory.close()


class LocalHost:
    """Implements `aegis.node.machine.InstanceHosts`: every instance is started here. `open_more` opens another device,
    or a group of them, where there are any left; it raises UserError."""

    def __init__(
        self, machine: LocalMachine, devices: Devices, open_more: Callable[[], Sequence[PhysicalPool]] = list
    ) -> None:
        self._machine = machine
        self._devices = devices
        self._open_more = open_more
        self._words = EventWords()

    async def host(self, instance: InstanceId) -> InstanceHost:
        return InstanceHost(self._machine, self._devices.addresses(instance), self._words.take())

    async def admit(self, instance: InstanceId) -> None:
        if not self._devices.vacant() and (pools := await asyncio.to_thread(self._open_more)):
            self._devices.place(instance, pools)
        else:
            self._devices.share(instance)
        self._machine.instances += 1

    async def leave(self, instance: InstanceId) -> None:
        """The instance has left for good; its device stays, for others."""
        self._machine.instances -= 1
        await self._devices.leave(instance)
