"""Host memory for KV of several machines: an instance leases slabs of the machine it is on, and may read from any.

So the slabs of a lost instance are free again when no living instance of any machine reads from them. Kept KV serves
only the machine's own instances.
"""

from __future__ import annotations

from collections.abc import Callable

from aegis.core.ids import InstanceId, MachineId, ModelId
from aegis.core.messages import PeerForgotten
from aegis.core.model import ModelSpec
from aegis.core.request import Job, KeptPrefix
from memory.host_kv import Answers, ForHost, HostKv
from memory.kept_prefixes import Counters


class MachinesKv:
    """One `HostKv` for each machine, all of slabs of `slab_bytes`. `spec_of` knows the models whose KV may be kept:
    none until it is set. Numbers are those of all machines together, and may be read from any thread."""

    __slots__ = ("_machine_of", "_machines", "_slab_bytes", "counters", "spec_of")

    def __init__(self, slab_bytes: int) -> None:
        self.spec_of: Callable[[ModelId], ModelSpec | None] = lambda model: None
        self.counters = Counters()
        self._slab_bytes = slab_bytes
        self._machines: dict[MachineId, HostKv] = {}
        self._machine_of: dict[InstanceId, MachineId] = {}

    @property
    def capacity(self) -> int:
        return sum(host.leases.capacity for host in list(self._machines.values()))

    @property
    def free(self) -> int:
        return sum(host.leases.free for host in list(self._machines.values()))

    @property
    def leased(self) -> int:
        return sum(host.leases.leased for host in list(self._machines.values()))

    @property
    def kept(self) -> int:
        return sum(host.leases.kept for host in list(self._machines.values()))

    @property
    def kept_bytes(self) -> int:
        return sum(host.kept.nbytes for host in list(self._machines.values()))

    def open(self, machine: MachineId, capacity: int) -> None:
        """The machine has so many slabs."""
        host = self._machines[machine] = HostKv(capacity, self._slab_bytes, self._spec_of, self.counters)
        for instance in self._machine_of:
            host.join(instance)

    def close(self, machine: MachineId) -> None:
        """The machine is gone, and its instances are lost already."""
        assert not self.has_instances(machine)
        del self._machines[machine]

    def has_instances(self, machine: MachineId) -> bool:
        """Whether any instance there is not lost."""
        return machine in self._machine_of.values()

    def prefix_of(self, instance: InstanceId, job: Job) -> KeptPrefix | None:
        """The kept KV of the job's prompt on the machine of the instance."""
        own = self._machine_of.get(instance)
        return None if own is None else self._machines[own].prefix_of(job)

    def join(self, instance: InstanceId, machine: MachineId) -> None:
        self._machine_of[instance] = machine
        for host in self._machines.values():
            host.join(instance)

    def lost(self, instance: InstanceId, words: tuple[int, ...]) -> Answers:
        """The process of the instance with these words is gone; all other instances are asked to forget it."""
        own, answers = self._machine_of.pop(instance), Answers()
        for machine, host in self._machines.items():
            answers += host.lost(instance, words) if machine == own else host.leave(instance)
        return answers

    def on_message(self, instance: InstanceId, message: ForHost) -> Answers:
        if isinstance(message, PeerForgotten):
            return self._forgotten(instance, message)
        return self._machines[self._machine_of[instance]].on_message(instance, message)

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        for host in self._machines.values():
            host.check()

    def _forgotten(self, instance: InstanceId, message: PeerForgotten) -> Answers:
        """Each answer counts for one machine, since there was one question for each machine on which the peer was lost.
        If that machine is gone, it counts for none."""
        for host in self._machines.values():
            if host.leases.awaits(instance, message.peer):
                return host.on_message(instance, message)
        return []

    def _spec_of(self, model: ModelId) -> ModelSpec | None:
        return self.spec_of(model)
