"""The devices of the node: their memory, the accounts of it, and the instances on each.

The memory lives in this process, which outlives instances; `memory.page_arbiter` decides about it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from aegis.config.sizes import format_size
from aegis.core.clock import NS_PER_S, Clock
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId
from aegis.core.messages import GaveBack, NeedPages, Telemetry, ToInstance
from aegis.device.protocol import PhysicalPool
from aegis.process.error_lines import flattened
from aegis.process.tasks import watched
from aegis.telemetry.logs import log
from memory.page_arbiter import PATIENCE_NS, TICK_NS, ArbiterEffect, PageArbiter, Settled, WipeLost

_logger = logging.getLogger(__name__)


class Wire(Protocol):
    """The node, as the devices need it."""

    def post(self, instance: InstanceId, message: ToInstance) -> None: ...


@dataclass(frozen=True, slots=True)
class _Device:
    """The devices of a group of ranks, each with a pool: the same pages of all of them are taken and given back."""

    pools: Sequence[PhysicalPool]
    arbiter: PageArbiter

    @property
    def page_bytes(self) -> int:
        return self.pools[0].page_bytes

    @property
    def page_count(self) -> int:
        return min(pool.page_count for pool in self.pools)


class Devices:
    """`placement` maps each instance to its device; `ranks` pools in a row count as one. Methods are called on the
    event loop."""

    def __init__(
        self,
        pools: Sequence[PhysicalPool],
        placement: Mapping[InstanceId, int],
        clock: Clock,
        *,
        floor_bytes: int,
        idle_s: float,
        ranks: int = 1,
        check_laws: bool = False,
    ) -> None:
        self.wire: Wire | None = None
        self._clock = clock
        self._check_laws = check_laws
        self._next_command = 0
        self._commands: dict[int, asyncio.Future[Settled]] = {}
        self._wiping: set[asyncio.Task[None]] = set()
        self._floor_bytes = floor_bytes
        self._idle_s = idle_s
        self._devices = [self._device(pools[at : at + ranks]) for at in range(0, len(pools), ranks)]
        self._placement = {instance: self._devices[at] for instance, at in placement.items()}

    @property
    def page_bytes(self) -> int:
        return self._devices[0].page_bytes

    @property
    def page_count(self) -> int:
        """The number of pages of each device."""
        return min(device.page_count for device in self._devices)

    def place(self, instance: InstanceId, pools: Sequence[PhysicalPool]) -> None:
        """From now on the instance has a device of its own, of these pools; the one that it had before is gone. It is
        not up."""
        device, before = self._device(pools), self._placement.get(instance)
        self._devices = [other for other in self._devices if other is not before] + [device]
        self._placement[instance] = device

    def share(self, instance: InstanceId) -> None:
        """Places the instance on the device with the fewest instances."""
        count = Counter(map(id, self._placement.values()))
        self._placement[instance] = min(self._devices, key=lambda device: count[id(device)])

    def has(self, instance: InstanceId) -> bool:
        return instance in self._placement

    def vacant(self) -> bool:
        """Whether a device has no instance."""
        taken = list(self._placement.values())
        return any(device not in taken for device in self._devices)

    async def leave(self, instance: InstanceId, *, with_device: bool = False) -> None:
        """The instance is not up, and does not come up any more; with `with_device` its device goes, too."""
        device = self._placement.pop(instance)
        device.arbiter.forget(instance)
        if with_device:
            while self._wiping:
                await asyncio.wait(self._wiping)
            self._devices.remove(device)

    def addresses(self, instance: InstanceId) -> list[str]:
        """The addresses by which the instance's ranks open their devices."""
        return [pool.address for pool in self._of(instance).pools]

    def device_of(self, instance: InstanceId) -> int:
        """The ordinal of its device."""
        return self._devices.index(self._of(instance))

    def numbers(self, instance: InstanceId) -> tuple[int, ...]:
        """The numbers of the devices of its ranks."""
        device = self._of(instance)
        first = sum([len(other.pools) for other in self._devices[: self._devices.index(device)]])
        return tuple(range(first, first + len(device.pools)))

    def arbiters(self) -> list[PageArbiter]:
        """The accounts of each device."""
        return [device.arbiter for device in self._devices]

    # --- instances ----------------------------------------------------------------------------------------------------

    def join(self, instance: InstanceId) -> None:
        self._of(instance).arbiter.join(instance)

    def lost(self, instance: InstanceId) -> None:
        device = self._of(instance)
        self._perform(device, device.arbiter.lost(instance))

    def pages_requested(self, instance: InstanceId, request: NeedPages) -> None:
        device = self._of(instance)
        self._perform(device, device.arbiter.ask(instance, request))

    def gave_back(self, instance: InstanceId, answer: GaveBack) -> None:
        device = self._of(instance)
        self._perform(device, device.arbiter.gave_back(instance, answer))

    def seen(self, instance: InstanceId, report: Telemetry) -> None:
        busy = report.queued + report.running > 0
        self._of(instance).arbiter.seen(instance, busy=busy, now_ns=self._clock.now_ns())

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(TICK_NS / NS_PER_S)
            for device in self._devices:
                self._perform(device, device.arbiter.tick(self._clock.now_ns()))

    # --- commands -----------------------------------------------------------------------------------------------------

    async def limit(self, name: str, nbytes: int, *, least_bytes: int, timeout_s: float) -> int:
        """Answers when the instance holds no more than that, with the bytes that it gave back. Raises UserError, with
        nothing changed, if it cannot be done or not in time."""
        instance, device = self._up(name)
        pages, page_bytes = nbytes // device.page_bytes, device.page_bytes
        if nbytes < least_bytes:
            raise UserError(
                f"{name} needs at least {format_size(least_bytes)}: the largest model it serves and a slab",
                param="limit",
            )
        command, settled = self._command()
        pages = min(pages, device.page_count)
        patience_ns = round(timeout_s * NS_PER_S)
        self._perform(device, device.arbiter.set_limit(instance, pages, command=command, patience_ns=patience_ns))
        outcome = await self._outcome(command, settled, name, timeout_s)
        if outcome.refused:
            could = format_size(outcome.pages * page_bytes) if outcome.pages else "nothing"
            raise UserError(
                f"{name} could give back {could} within {timeout_s:g} s, which is not enough: its limit stays what it "
                "was; try a longer timeout or a higher limit",
                status=409,
                kind="conflict_error",
            )
        return outcome.pages * page_bytes

    async def trim(self, name: str, *, timeout_s: float) -> int:
        """Answers when the instance has given back pages that it does not need now, with the number of bytes. Raises
        UserError."""
        instance, device = self._up(name)
        command, settled = self._command()
        self._perform(device, device.arbiter.trim(instance, command=command))
        outcome = await self._outcome(command, settled, name, timeout_s)
        return outcome.pages * device.page_bytes

    async def close(self) -> None:
        """Closes the pools once the instances are gone."""
        for task in list(self._wiping):
            await task
        for device in self._devices:
            for pool in device.pools:
                pool.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _device(self, pools: Sequence[PhysicalPool]) -> _Device:
        pages, floor = min(pool.page_count for pool in pools), self._floor_bytes // pools[0].page_bytes
        idle_ns = round(self._idle_s * NS_PER_S)
        return _Device(pools, PageArbiter(pages, floor=floor, idle_ns=idle_ns, patience_ns=PATIENCE_NS))

    def _of(self, instance: InstanceId) -> _Device:
        return self._placement[instance]

    def _up(self, name: str) -> tuple[InstanceId, _Device]:
        for device in self._devices:
            for instance in device.arbiter.use():
                if instance == name:
                    return instance, device
        known = ", ".join(sorted(self._placement))
        raise UserError(f"no instance '{name}' is up; there are {known}", status=404, param="instance")

    def _command(self) -> tuple[int, asyncio.Future[Settled]]:
        self._next_command += 1
        settled = self._commands[self._next_command] = asyncio.get_running_loop().create_future()
        return self._next_command, settled

    async def _outcome(self, command: int, settled: asyncio.Future[Settled], name: str, timeout_s: float) -> Settled:
        """The outcome of a command. An instance answers in time unless it hangs; a late answer is booked whenever it
        comes."""
        try:
            async with asyncio.timeout(timeout_s + PATIENCE_NS / NS_PER_S):
                return await settled
        except TimeoutError:
            raise UserError(f"{name} did not answer within {timeout_s:g} s", status=504, kind="server_error") from None
        finally:
            del self._commands[command]

    def _perform(self, device: _Device, effects: Iterable[ArbiterEffect]) -> None:
        if self._check_laws:
            device.arbiter.check()
        assert self.wire is not None
        for effect in effects:
            match effect:
                case WipeLost():
                    task = watched(self._wipe(device, effect))
                    self._wiping.add(task)
                    task.add_done_callback(self._wiping.discard)
                case Settled(command):
                    settled = self._commands.get(command)
                    if settled and not settled.done():
                        settled.set_result(effect)
                case (instance, message):
                    self.wire.post(instance, message)

    async def _wipe(self, device: _Device, lost: WipeLost) -> None:
        """Pages that cannot be wiped are nobody's any more: they show what the lost process wrote."""
        try:
            for pool in device.pools:
                await asyncio.to_thread(pool.wipe, lost.runs)
        except (OSError, UserError) as error:
            why, pages = flattened(error), sum([run.pages for run in lost.runs])
            told = "pages of a lost process cannot be wiped and are used no more"
            log(_logger, logging.ERROR, told, {"pages": pages, "why": why})
        else:
            self._perform(device, device.arbiter.wiped(lost.key))
