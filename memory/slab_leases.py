"""Host KV slabs of a machine, leased to its instances: one owner of the accounts, blocks counted by the lessee.

Leasing by slab keeps the token path free of messages: an instance asks rarely and allocates blocks on its own. What
cannot be granted at once is refused at once (the asker may then give KV up) and also remembered: slabs that come back
go to the instances that still want some. KV of the past that is kept (`memory.kept_prefixes`) has slabs only as long as
nobody else wants them: what is to be written to one is awaited, and then it goes too. A request is granted whole and
strictly in order of asking: two instances that each held a part of what they need would wait for each other for ever,
and small requests would starve a large one.

When an instance is lost its slabs may still be read by others' swap-ins. They are free again once every live instance
has said, as often as it was asked, that it has no transfer from them left.

Laws: (L1) free + leased + orphaned + kept == capacity; (L2) a slab is in one place only; (L3) who has waited longest
wants more than is free, and nothing that is kept could go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, SlabId
from aegis.core.messages import ForgetPeer, GrantSlabs
from memory.kept_prefixes import KeptPrefixes


@dataclass(slots=True)
class _Orphans:
    slabs: list[SlabId]
    answers: Counter[InstanceId]  # still to come, from each


Grants = list[tuple[InstanceId, GrantSlabs | ForgetPeer]]


class SlabLeases:
    """`capacity` slabs of one host region, some of which may hold what is `kept`."""

    __slots__ = ("_free", "_kept", "_leased", "_orphans", "_wanted", "capacity")

    def __init__(self, capacity: int, kept: KeptPrefixes | None = None) -> None:
        self.capacity = capacity
        self._kept = kept
        self._free = [SlabId(i) for i in range(capacity - 1, -1, -1)]
        self._leased: dict[InstanceId, set[SlabId]] = {}
        self._wanted: dict[InstanceId, int] = {}  # in order of asking
        self._orphans: dict[InstanceId, _Orphans] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def leased(self) -> int:
        """The slabs of instances that are up. The rest is free, or may still be read from by others' transfers."""
        return sum(map(len, self._leased.values()))

    @property
    def kept(self) -> int:
        """The slabs that are as good as free."""
        return self._kept.slabs if self._kept else 0

    def join(self, instance: InstanceId) -> None:
        assert instance not in self._leased
        self._leased[instance] = set()

    def ask(self, instance: InstanceId, count: int) -> Grants:
        """Grants `count` slabs, or none. Asking again replaces the request and keeps its place. Where there is no
        answer at once, it comes when what is kept has been written."""
        self._wanted[instance] = count
        grants = self.serve()
        if instance in self._wanted and self._wanted_until(instance) > self.free + self.kept:
            grants.append((instance, GrantSlabs((), refused=True)))
        return grants

    def give_back(self, instance: InstanceId, slabs: Iterable[SlabId]) -> Grants:
        for slab in slabs:
            self._leased[instance].remove(slab)
            self._free.append(slab)
        return self.serve()

    def spare(self) -> SlabId | None:
        """A slab for what is to be kept, which is held by `kept` then."""
        return None if self._wanted or not self._free else self._free.pop()

    def lost(self, instance: InstanceId, words: tuple[int, ...]) -> Grants:
        """The instance's process is gone, whose these words were; the others are asked to forget it."""
        self._wanted.pop(instance, None)
        for orphans in self._orphans.values():
            orphans.answers.pop(instance, None)
        mine = self._orphans.setdefault(instance, _Orphans([], Counter()))
        mine.slabs += sorted(self._leased.pop(instance))
        mine.answers.update(list(self._leased))
        grants: Grants = [(other, ForgetPeer(instance, words)) for other in sorted(self._leased)]
        return grants + self._settle()

    def leave(self, reader: InstanceId) -> Grants:
        """A reader of another machine is gone; its own slabs are there."""
        assert not self._leased[reader] and reader not in self._wanted
        del self._leased[reader]
        for orphans in self._orphans.values():
            orphans.answers.pop(reader, None)
        return self._settle()

    def awaits(self, instance: InstanceId, peer: InstanceId) -> bool:
        """Whether the instance was asked to forget the peer and has not answered."""
        return peer in self._orphans and self._orphans[peer].answers[instance] > 0

    def forgotten(self, instance: InstanceId, peer: InstanceId) -> Grants:
        """`instance` has no transfer from the lost `peer`'s slabs left."""
        self._orphans[peer].answers.subtract([instance])
        return self._settle()

    def check(self) -> None:
        places = [list(self._free), *map(list, self._leased.values()), *(o.slabs for o in self._orphans.values())]
        everything = [slab for place in places for slab in place]
        everything += self._kept.held() if self._kept else []
        if len(everything) != self.capacity:
            raise LawBroken(f"L1: {len(everything)} slabs counted, {self.capacity} exist")
        if len(set(everything)) != len(everything):
            raise LawBroken("L2: a slab is in two places")
        if self._wanted and next(iter(self._wanted.values())) <= self.free + (self._kept.idle if self._kept else 0):
            raise LawBroken(f"L3: {self.free} slabs are free, the first in line wants fewer")

    def serve(self) -> Grants:
        """Grants what it can. To be called also when what is kept has been written."""
        grants: Grants = []
        while self._wanted:
            instance, count = next(iter(self._wanted.items()))
            if self._kept and count <= len(self._free) + self._kept.idle:
                self._free += self._kept.release(count - len(self._free))
            if count > len(self._free):
                break
            del self._wanted[instance]
            slabs = tuple(self._free.pop() for _ in range(count))
            self._leased[instance].update(slabs)
            grants.append((instance, GrantSlabs(slabs)))
        return grants

    def _settle(self) -> Grants:
        for peer in [p for p, orphans in self._orphans.items() if not orphans.answers.total()]:
            self._free += self._orphans.pop(peer).slabs
        return self.serve()

    def _wanted_until(self, last: InstanceId) -> int:
        """The number of slabs that the instances in line up to this one want together."""
        wanted = 0
        for instance, count in self._wanted.items():
            wanted += count
            if instance == last:
                break
        return wanted
