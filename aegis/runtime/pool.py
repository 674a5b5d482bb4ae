"""The instances' processes: started, watched, started again when they die.

Each start of an instance is an incarnation with shared words of its own. When a process is lost, and whoever has to
know does, its words are poisoned, so that whoever waits for one of its copies goes on; what it held is replayed by the
session cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from aegis.core.effects import StreamName
from aegis.core.ids import InstanceId
from aegis.core.messages import Shutdown
from aegis.core.role import Role
from aegis.device.shared_words import SharedWords
from aegis.device.stage import STAGE_WORDS
from aegis.runtime.instance_settings import InstanceSettings
from aegis.runtime.link import Hub, Said
from aegis.runtime.restarts import Restarts
from aegis.runtime.watched import watched

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

WORDS = 1 << 16
WORDS_PER_INSTANCE = len(StreamName) + STAGE_WORDS


@dataclass(slots=True)
class _Place:
    """One instance; `process` is that of its present incarnation."""

    instance: InstanceId
    role: Role
    incarnation: int = 0
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    drained: bool = False  # not started again until that ends
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    restarts: Restarts = field(default_factory=Restarts)
    keeper: asyncio.Task[None] | None = None


def follow_launcher() -> None:
    """In a child, before all else: Ctrl-C reaches the whole group, and the launcher decides what it means; one that is
    killed outright leaves no orphans (prctl PR_SET_PDEATHSIG, Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Pool:
    """The processes behind the instances of one node."""

    def __init__(
        self,
        template: InstanceSettings,
        instances: dict[InstanceId, Role],
        device_address: Callable[[InstanceId], str],
        link: Hub[Said],
        words: SharedWords,
        on_lost: Callable[[InstanceId, int], Awaitable[None]],
        on_given_up: Callable[[InstanceId], None],
    ) -> None:
        """`template` is completed for each start. `on_lost` is told which incarnation ended."""
        self._template = template
        self._device_address = device_address
        self._link = link
        self._words = words
        self._next_word = 0
        self._on_lost = on_lost
        self._on_given_up = on_given_up
        self._places = {name: _Place(name, role) for name, role in instances.items()}
        self._close_asked = asyncio.Event()

    @property
    def _closing(self) -> bool:
        return self._close_asked.is_set()

    def start(self) -> None:
        for place in self._places.values():
            place.keeper = watched(self._keep(place))

    def roles(self) -> dict[InstanceId, Role]:
        return {name: place.role for name, place in self._places.items()}

    def role(self, instance: InstanceId) -> Role:
        return self._places[instance].role

    def identity(self, instance: InstanceId) -> str:
        return f"{instance}/{self._places[instance].incarnation}"

    def sender(self, identity: str) -> InstanceId | None:
        """Whose living process this is; None for one that was lost."""
        name, _, _ = identity.rpartition("/")
        place = self._places.get(InstanceId(name))
        return place.instance if place and place.process and self.identity(place.instance) == identity else None

    def became_ready(self, instance: InstanceId) -> None:
        place = self._places[instance]
        place.ready = True

    def missing(self) -> list[InstanceId]:
        """Instances that do not serve at the moment."""
        return [place.instance for place in self._places.values() if not place.ready and not place.drained]

    def dead(self) -> list[InstanceId]:
        """Instances that do not come up and are not tried any more."""
        return [place.instance for place in self._places.values() if place.restarts.given_up]

    def hopeless(self) -> bool:
        """Whether a role is left without any instance that might come up."""
        alive = {place.role for place in self._places.values() if not place.restarts.given_up}
        return alive != {place.role for place in self._places.values()}

    def fence(self, instance: InstanceId, incarnation: int) -> bool:
        """Ends that process at once, whatever state it is in. False where it is the instance's no more."""
        place = self._places[instance]
        if place.process is None or place.incarnation != incarnation:
            return False
        with contextlib.suppress(ProcessLookupError):
            place.process.kill()
        return True

    def drain(self, instance: InstanceId) -> None:
        """Ends its process after the step in hand, and starts none."""
        place = self._places[instance]
        place.drained = True
        place.resumed.clear()
        self._link.send(self.identity(instance), [Shutdown()])

    def drained(self, instance: InstanceId) -> bool:
        """Whether it has no process any more, and shall have none."""
        place = self._places[instance]
        return place.drained and place.process is None

    def resume(self, instance: InstanceId, role: Role) -> None:
        """Starts a drained instance again, as this."""
        place = self._places[instance]
        place.role, place.drained, place.restarts = role, False, Restarts()
        place.resumed.set()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Asks every process to stop, then ends those that do not."""
        self._close_asked.set()
        places = [place for place in self._places.values() if place.process]
        for place in self._places.values():
            place.resumed.set()
        for place in places:
            with contextlib.suppress(Exception):
                self._link.send(self.identity(place.instance), [Shutdown()])
        keepers = [place.keeper for place in self._places.values() if place.keeper]
        _, late = await asyncio.wait(keepers, timeout=timeout_s) if keepers else ((), ())
        for place in self._places.values():
            if place.keeper in late and place.process:
                with contextlib.suppress(ProcessLookupError):
                    place.process.kill()
        if late:
            await asyncio.wait(late)

    async def _keep(self, place: _Place) -> None:
        """Starts the instance again and again, until it is given up or the pool closes."""
        while not self._closing:
            words = self._new_words()
            try:
                process = await self._spawn(place, words)
            except OSError as error:
                log.warning("%s cannot be started: %s", place.instance, error.strerror)
                place.restarts.failed()
            else:
                await self._watch(place, process, words)
            if place.drained:
                await place.resumed.wait()
                continue
            if self._closing:
                return
            if place.restarts.given_up:
                self._on_given_up(place.instance)
                return
            await self._closed_within(place.restarts.pause_s)

    async def _watch(self, place: _Place, process: asyncio.subprocess.Process, words: tuple[int, ...]) -> None:
        """Until the process ends."""
        started_s = time.monotonic()
        code = await process.wait()
        after_s = time.monotonic() - started_s
        was_ready, place.ready, place.process = place.ready, False, None
        if not self._closing:
            log.warning("%s (pid %d) ended with code %d", place.instance, process.pid, code)
            await self._on_lost(place.instance, place.incarnation)
        for word in words:
            self._words.poison(word)
        if self._closing:
            return
        place.restarts.ended(served=was_ready, after_s=after_s)

    async def _spawn(self, place: _Place, words: tuple[int, ...]) -> asyncio.subprocess.Process:
        place.incarnation += 1
        settings = msgspec.structs.replace(
            self._template,
            instance=place.instance,
            incarnation=place.incarnation,
            role=place.role,
            words=words,
            device_address=self._device_address(place.instance),
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "aegis.runtime.instance",
            place.instance,  # for whoever looks at the processes
            stdin=asyncio.subprocess.PIPE,
            env=self._environment(),
            preexec_fn=follow_launcher,
        )
        place.process = process
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings))
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        process.stdin.close()
        return process

    def _new_words(self) -> tuple[int, ...]:
        words = tuple(range(self._next_word, self._next_word + WORDS_PER_INSTANCE))
        self._next_word += WORDS_PER_INSTANCE
        assert self._next_word <= WORDS
        return words

    def _environment(self) -> dict[str, str]:
        """Threads shared fairly between instances: more than there are cores makes timings go wild."""
        threads = max(1, len(os.sched_getaffinity(0)) // (len(self._places) + 1))
        return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **os.environ}

    async def _closed_within(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._close_asked.wait(), timeout_s)
