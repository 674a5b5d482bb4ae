"""The use of the host's KV slabs, sampled in even steps of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.model import KvShape
from aegis.sim.event_queue import EventQueue
from memory.ledger import Ledger


@dataclass(frozen=True, slots=True)
class HostUse:
    """Slabs of one shape, of all instances together."""

    at_ns: int
    shape: KvShape
    held_bytes: int
    taken_bytes: int  # by blocks: the rest of what is held is waste


class Sampler:
    """Samples from now on, until nothing else is left to happen."""

    def __init__(self, agenda: EventQueue, every_ns: int, ledgers: Sequence[Ledger]) -> None:
        self.samples: list[HostUse] = []
        self._agenda = agenda
        self._every_ns = every_ns
        self._ledgers = ledgers
        agenda.at(agenda.now_ns, self._sample)

    def _sample(self) -> None:
        held: defaultdict[KvShape, int] = defaultdict(int)
        taken: defaultdict[KvShape, int] = defaultdict(int)
        for ledger in self._ledgers:
            for shape, use in ledger.host.use().items():
                held[shape] += use.slabs * use.slab_bytes
                taken[shape] += (use.reserved + use.used + use.moving) * use.block_bytes
        self.samples += [HostUse(self._agenda.now_ns, shape, held[shape], taken[shape]) for shape in held]
        if len(self._agenda):
            self._agenda.at(self._agenda.now_ns + self._every_ns, self._sample)
