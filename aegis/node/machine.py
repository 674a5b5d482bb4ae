"""A machine as its node sees it: memory that its instances share, and their processes. What is counted is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from aegis.core.effects import StreamName
from aegis.core.ids import InstanceId, MachineId
from aegis.core.model import ModelSpec
from aegis.device.peer_transfers import PEER_STREAMS, PEER_WORDS
from aegis.device.stage_buffer import STAGE_WORDS
from aegis.instance.settings import InstanceSettings

WORDS = 1 << 22
"""Enough for a hundred thousand starts; in 32 MiB, of which a machine without a GPU uses a page as it comes to it."""
WORDS_PER_INSTANCE = len(StreamName) + STAGE_WORDS + PEER_STREAMS + PEER_WORDS


class RankMemory(Struct, frozen=True):
    """The memory that all instances of a machine share, for one rank."""

    words_path: str
    host_kv_path: str
    images_path: str


class Running(Protocol):
    """An instance's processes."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """Ends them at once, whatever state they are in; `wait` returns soon."""
        ...

    async def wait(self) -> int:
        """Waits until they have ended; returns the exit code of the first that did."""
        ...


class Machine(Protocol):
    """`LocalMachine`, or one of a Ray cluster."""

    @property
    def id(self) -> MachineId: ...

    @property
    def memory(self) -> Sequence[RankMemory]:
        """The memory of each rank."""
        ...

    @property
    def clock_ahead_ns(self) -> int:
        """The time by which its clock is later than the launcher's."""
        ...

    @property
    def rendezvous(self) -> str:
        """The beginning of paths of sockets that the ranks of its instances may make."""
        ...

    def localised(self, spec: ModelSpec) -> ModelSpec:
        """The spec with the paths that its image has on the machine."""
        ...

    def poison(self, words: Sequence[int]) -> None:
        """Passes all events of a process that is no more, on all ranks."""
        ...

    async def start(self, ranks: Sequence[InstanceSettings]) -> Running:
        """Raises OSError if the system refuses."""
        ...


@dataclass(frozen=True, slots=True)
class InstanceHost:
    """The place in which an instance is started: a machine, the devices of its ranks, and words of its own."""

    machine: Machine
    devices: Sequence[str]
    words: tuple[int, ...]


class InstanceHosts(Protocol):
    """Says where instances are started."""

    async def host(self, instance: InstanceId) -> InstanceHost:
        """A new one with each start. Waits until there is a machine for it. Raises UserError if that cannot do with
        what it has."""
        ...

    async def admit(self, instance: InstanceId) -> None:
        """Finds devices for one more. Raises UserError, with nothing changed, where there is no room."""
        ...

    async def leave(self, instance: InstanceId) -> None:
        """The instance has ended, and is not started any more."""
        ...


class EventWords:
    """Gives each start of an instance words of its own. A word is never given twice."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> tuple[int, ...]:
        words = tuple(range(self._next, self._next + WORDS_PER_INSTANCE))
        self._next += WORDS_PER_INSTANCE
        assert self._next <= WORDS
        return words
