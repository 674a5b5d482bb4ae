"""The machine that this process is on: its shared memory, made here, and children of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aegis.core.ids import InstanceId, MachineId
from aegis.core.model import ModelSpec
from aegis.device.base import PhysicalPool
from aegis.device.host_memory import SharedMemory
from aegis.device.shared_words import SharedWords
from aegis.runtime import processes
from aegis.runtime.devices import Devices
from aegis.runtime.image_filler import ImageFiller
from aegis.runtime.instance_settings import InstanceSettings
from aegis.runtime.machine import WORDS, Home, RankMemory, WordsTaken
from aegis.runtime.processes import Processes


class NearMachine:
    """Implements `aegis.runtime.machine.Machine`. Each of the `ranks` has `host_kv_bytes`; they share `cache_bytes`, as
    the `instances` do the cores."""

    clock_ahead_ns = 0

    def __init__(
        self, *, host_kv_bytes: int, cache_bytes: int, ranks: int, instances: int, meeting: str, machine: str = ""
    ) -> None:
        self.id = MachineId(machine)
        self.meeting = meeting
        self.filler = ImageFiller(cache_bytes, ranks=ranks)
        self.words = [SharedWords.create(WORDS) for _ in range(ranks)]
        self.host_kv = [SharedMemory.create(host_kv_bytes, "kv") for _ in range(ranks)]
        self.instances = instances
        self._ranks = ranks

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
        return await processes.start(ranks, processes.environment_for(self.instances * self._ranks))

    def close(self) -> None:
        """Its instances are gone, or going."""
        self.filler.close()


class OneHome:
    """Implements `aegis.runtime.machine.Homes`: every instance is started here. `open_more` opens another device, or a
    group of them, where there are any left; it raises UserError."""

    def __init__(
        self, machine: NearMachine, devices: Devices, open_more: Callable[[], Sequence[PhysicalPool]] = list
    ) -> None:
        self._machine = machine
        self._devices = devices
        self._open_more = open_more
        self._words = WordsTaken()

    async def home(self, instance: InstanceId) -> Home:
        return Home(self._machine, self._devices.addresses(instance), self._words.take())

    async def admit(self, instance: InstanceId) -> None:
        if not self._devices.vacant() and (pools := await asyncio.to_thread(self._open_more)):
            self._devices.place(instance, pools)
        else:
            self._devices.share(instance)
        self._machine.instances += 1

    async def leave(self, instance: InstanceId) -> None:
        """Its device stays, for others."""
        self._machine.instances -= 1
        await self._devices.leave(instance)
