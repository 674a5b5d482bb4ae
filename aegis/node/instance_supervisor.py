"""The instances' processes: started, watched, started again when they die; instances that join, and leave.

Each start of an instance is an incarnation with shared words of its own. When a process is lost, and everyone who has
to know does, its words are poisoned, so that processes that wait for one of its copies go on; the routers replay its
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, MachineId
from aegis.core.messages import Shutdown
from aegis.core.model import ModelSpec
from aegis.core.role import Role
from aegis.instance.settings import InstanceSettings
from aegis.node.machine import InstanceHost, InstanceHosts, Running
from aegis.process.restart_backoff import RestartBackoff
from aegis.process.tasks import cancelled, watched
from aegis.transport.links import Hub, NodeMessage

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Place:
    """One instance; `process` and `host` are those of its present incarnation."""

    instance: InstanceId
    role: Role
    incarnation: int = 0
    host: InstanceHost | None = None
    process: Running | None = None
    living: bool = False  # from the moment at which it is asked for; a process may be ready before that is answered
    ready: bool = False
    coming: bool = False  # it was asked for, and nothing depends on it yet
    joining: bool = False  # the same, and it has never served: not tried again
    failure: str = ""  # the reason why it is not tried again
    drained: bool = False  # not started again until that ends
    returns: bool = False  # it is drained only to be started again
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Event = field(default_factory=asyncio.Event)  # not started again, ever
    restarts: RestartBackoff = field(default_factory=RestartBackoff)
    keeper: asyncio.Task[None] | None = None


class InstanceSupervisor:
    """The processes behind the instances of one node."""

    def __init__(
        self,
        template: InstanceSettings,
        instances: dict[InstanceId, Role],
        instance_hosts: InstanceHosts,
        link: Hub[NodeMessage],
        on_lost: Callable[[InstanceId, int], Awaitable[None]],
        on_given_up: Callable[[InstanceId], None],
    ) -> None:
        """`template` is completed for each start. `on_lost` is told which incarnation ended."""
        self._template = template
        self._instance_hosts = instance_hosts
        self._link = link
        self._on_lost = on_lost
        self._on_given_up = on_given_up
        self._places = {name: _Place(name, role) for name, role in instances.items()}
        self._named = Counter(instances.values())  # of each role, ever
        self._closing = False

    def start(self) -> None:
        for place in self._places.values():
            place.keeper = watched(self._keep(place))

    def roles(self) -> dict[InstanceId, Role]:
        """The role of each instance. May be called from any thread."""
        return {name: place.role for name, place in list(self._places.items())}

    def role(self, instance: InstanceId) -> Role:
        return self._places[instance].role

    def identity(self, instance: InstanceId) -> str:
        return f"{instance}/{self._places[instance].incarnation}"

    def sender(self, identity: str) -> InstanceId | None:
        """The instance whose living process this is; None for a lost one."""
        name, _, _ = identity.rpartition("/")
        place = self._places.get(InstanceId(name))
        return place.instance if place and place.living and self.identity(place.instance) == identity else None

    def machine(self, instance: InstanceId) -> MachineId:
        """The machine of its living process."""
        host = self._places[instance].host
        assert host
        return host.machine.id

    def words(self, instance: InstanceId) -> tuple[int, ...]:
        """The words of its present, or its last, process."""
        host = self._places[instance].host
        assert host
        return host.words

    def poison(self, instance: InstanceId, words: Sequence[int]) -> None:
        """Passes events of its last process, which is no more, before all others know of that."""
        host = self._places[instance].host
        assert host
        host.machine.poison(words)

    def localised(self, instance: InstanceId, spec: ModelSpec) -> ModelSpec:
        """The spec with the paths that the image has where the instance's living process is."""
        host = self._places[instance].host
        assert host
        return host.machine.localised(spec)

    def became_ready(self, instance: InstanceId) -> None:
        place = self._places[instance]
        place.ready = True

    def missing(self) -> list[InstanceId]:
        """Instances that should serve and do not at the moment."""
        places = self._places.values()
        return [place.instance for place in places if not (place.ready or place.drained or place.coming)]

    def coming(self) -> set[InstanceId]:
        """Instances that were asked for and do not serve yet."""
        return {place.instance for place in self._places.values() if place.coming and not place.drained}

    def arrived(self, instance: InstanceId) -> None:
        """The instance serves."""
        place = self._places[instance]
        place.coming = place.joining = False

    def failure(self, instance: InstanceId) -> str:
        """The reason why an instance that should join does not; empty while it may."""
        return self._places[instance].failure

    def dead(self) -> list[InstanceId]:
        """Instances that do not come up and are not tried any more."""
        return [place.instance for place in self._places.values() if place.restarts.given_up]

    def staying(self) -> dict[InstanceId, Role]:
        """The roles of instances that serve, or will without a command."""
        places = self._places.values()
        return {p.instance: p.role for p in places if not (p.restarts.given_up or (p.drained and not p.living))}

    def states(self) -> dict[InstanceId, str]:
        """`up`, `starting`, `drained` or `given up`; from any thread."""
        return {place.instance: _state(place) for place in list(self._places.values())}

    def hopeless(self) -> bool:
        """Whether no request can be served without a command, however long one waits."""
        places = self._places.values()
        alive = {p.role for p in places if not p.restarts.given_up and (p.returns or not p.drained)}
        return Role.MIXED not in alive and not {Role.PREFILL, Role.DECODE} <= alive

    def fence(self, instance: InstanceId, incarnation: int) -> bool:
        """Ends that process at once, whatever state it is in. False if it is not the instance's any more."""
        place = self._places[instance]
        if place.process is None or place.incarnation != incarnation:
            return False
        place.process.kill()
        return True

    def drain(self, instance: InstanceId, *, returns: bool = False) -> None:
        """Ends its process after the step in hand, and starts none before it is resumed, which is soon if it
        `returns`."""
        place = self._places[instance]
        place.drained, place.returns = True, returns
        place.resumed.clear()
        self._link.send(self.identity(instance), [Shutdown()])

    def drained(self, instance: InstanceId) -> bool:
        """Whether it has no process any more, and will have none."""
        place = self._places[instance]
        return place.drained and not place.living

    def resume(self, instance: InstanceId, role: Role) -> None:
        """Starts a drained instance again, as this."""
        place = self._places[instance]
        place.role, place.coming, place.restarts = role, True, RestartBackoff()
        place.drained = place.returns = False
        place.resumed.set()

    async def admit(self, role: Role, count: int) -> list[InstanceId]:
        """Starts so many more, under names that were never used; each joins if it comes up at the first try. Raises
        UserError, with nothing changed, if there is no room for all of them."""
        names = [InstanceId(f"{role}-{self._named[role] + n}") for n in range(count)]
        self._named[role] += count
        admitted: list[InstanceId] = []
        try:
            for name in names:
                await self._instance_hosts.admit(name)
                admitted.append(name)
            if self._closing:
                raise UserError("the server is shutting down")
        except UserError:
            for name in admitted:
                await self._instance_hosts.leave(name)
            raise
        for name in names:
            place = self._places[name] = _Place(name, role, coming=True, joining=True)
            place.keeper = watched(self._keep(place))
        return names

    async def remove(self, instance: InstanceId) -> None:
        """Ends its process, if it has one, and forgets it."""
        place = self._places[instance]
        place.ending.set()
        place.resumed.set()
        if place.process:
            place.process.kill()
        if place.keeper:
            await asyncio.wait((place.keeper,))
        del self._places[instance]
        await self._instance_hosts.leave(instance)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Asks every process to stop, then ends those that do not."""
        self._closing = True
        places = [place for place in self._places.values() if place.process]
        for place in self._places.values():
            place.ending.set()
            place.resumed.set()
        for place in places:
            with contextlib.suppress(Exception):
                self._link.send(self.identity(place.instance), [Shutdown()])
        keepers = [place.keeper for place in self._places.values() if place.keeper]
        _, late = await asyncio.wait(keepers, timeout=timeout_s) if keepers else ((), ())
        for place in self._places.values():
            if place.keeper in late and place.process:
                place.process.kill()
        if late:
            await asyncio.wait(late)

    async def _keep(self, place: _Place) -> None:
        """Starts the instance again and again, until it is given up or has to end; an instance that joins, once."""
        while not place.ending.is_set():
            try:
                started = await self._started(place)
            except (OSError, UserError) as error:
                why = error.message if isinstance(error, UserError) else _said(error)
                log.warning("%s cannot be started: %s", place.instance, why)
                await self._not_started(place)
                place.restarts.failed()
            else:
                if started is None:
                    await self._not_started(place)
                    return
                why = await self._watch(place, *started)
            if place.drained:
                await place.resumed.wait()
                continue
            if place.ending.is_set():
                return
            if place.joining:
                place.failure = why
                return
            if place.restarts.given_up:
                place.coming = False
                self._on_given_up(place.instance)
                return
            await _within(place.ending, place.restarts.pause_s)

    async def _started(self, place: _Place) -> tuple[Running, InstanceHost] | None:
        """None if it has to end first. Raises OSError, UserError."""
        host = await _unless(place.ending, self._instance_hosts.host(place.instance))
        process = await _unless(place.ending, self._start(place, host)) if host else None
        return (process, host) if process and host else None

    async def _not_started(self, place: _Place) -> None:
        """It may have been ready nevertheless, before its start was answered."""
        was_ready, place.ready, place.living = place.ready, False, False
        if was_ready and not self._closing:
            await self._on_lost(place.instance, place.incarnation)

    async def _watch(self, place: _Place, process: Running, host: InstanceHost) -> str:
        """Waits until the process ends; returns how it did."""
        started_s = time.monotonic()
        if place.ending.is_set():
            process.kill()
        code = await process.wait()
        after_s = time.monotonic() - started_s
        was_ready, place.ready, place.living, place.process = place.ready, False, False, None
        if not self._closing:
            level = logging.INFO if place.drained and code == 0 else logging.WARNING
            log.log(level, "%s (pid %d) ended with code %d", place.instance, process.pid, code)
            await self._on_lost(place.instance, place.incarnation)
        host.machine.poison(host.words)
        if not self._closing:
            place.restarts.ended(served=was_ready, after_s=after_s)
        return f"its process ended with code {code}; see the log"

    async def _start(self, place: _Place, host: InstanceHost) -> Running:
        """Raises OSError."""
        place.incarnation += 1
        place.host = host
        place.living = True
        ranks = range(len(host.machine.memory))
        place.process = await host.machine.start([self._settings(place, host, rank) for rank in ranks])
        return place.process

    def _settings(self, place: _Place, host: InstanceHost, rank: int) -> InstanceSettings:
        memory = host.machine.memory[rank]
        return msgspec.structs.replace(
            self._template,
            instance=place.instance,
            incarnation=place.incarnation,
            role=place.role,
            machine=host.machine.id,
            clock_ahead_ns=host.machine.clock_ahead_ns,
            words=host.words,
            words_path=memory.words_path,
            host_kv_path=memory.host_kv_path,
            images_path=memory.images_path,
            device_address=host.devices[rank],
            instances=len(self._places),
            rank=rank,
            ranks=len(host.machine.memory),
            rendezvous=f"{host.machine.rendezvous}{place.instance}-{place.incarnation}",
        )


async def _unless(event: asyncio.Event, doing: Coroutine[None, None, T]) -> T | None:
    """What it returns; None where the event comes first, for which it is broken off."""
    done, waiting = asyncio.create_task(doing), asyncio.create_task(event.wait())
    await asyncio.wait((done, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not done.done():
        await cancelled(done)
    return None if done.cancelled() else done.result()


async def _within(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _state(place: _Place) -> str:
    if place.restarts.given_up:
        return "given up"
    if place.drained:
        return "drained"
    return "up" if place.ready else "starting"


def _said(error: OSError) -> str:
    """One that Python raises itself, as of a lost connection or a time that is over, has no `strerror`."""
    return error.strerror or str(error) or type(error).__name__
