"""Host KV slabs of the node, leased to its instances: one owner of the accounts, blocks counted by the lessee.

Leasing by slab keeps the token path free of messages: an instance asks rarely and allocates blocks on its own. What
cannot be granted at once is refused at once (the asker may then give KV up) and also remembered: slabs that come back
go to the instances that still want some. A wish is granted whole and strictly in order of asking: two instances that
each held a part of what they need would wait for each other for ever, and small wishes would starve a large one.

When an instance is lost its slabs may still be read by others' swap-ins. They are free again once every live instance
has said, as often as it was asked, that it has no transfer from them left.

Laws: (L1) free + leased + orphaned == capacity; (L2) a slab is in one place only; (L3) who has waited longest wants
more than is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, SlabId
from aegis.core.messages import ForgetPeer, GrantSlabs


@dataclass(slots=True)
class _Orphans:
    slabs: list[SlabId]
    answers: Counter[InstanceId]  # still to come, from each


Grants = list[tuple[InstanceId, GrantSlabs | ForgetPeer]]


class SlabLeases:
    """`capacity` slabs of one host region."""

    __slots__ = ("_free", "_leased", "_orphans", "_wanted", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = [SlabId(i) for i in range(capacity - 1, -1, -1)]
        self._leased: dict[InstanceId, set[SlabId]] = {}
        self._wanted: dict[InstanceId, int] = {}  # in order of asking
        self._orphans: dict[InstanceId, _Orphans] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def leased(self) -> int:
        """Those of instances that are up. The rest is free, or may still be read from by others' transfers."""
        return sum(map(len, self._leased.values()))

    def join(self, instance: InstanceId) -> None:
        assert instance not in self._leased
        self._leased[instance] = set()

    def ask(self, instance: InstanceId, count: int) -> Grants:
        """Grants `count` slabs, or none. Asking again replaces the wish and keeps its place."""
        self._wanted[instance] = count
        grants = self._serve()
        if instance in self._wanted:
            grants.append((instance, GrantSlabs((), refused=True)))
        return grants

    def give_back(self, instance: InstanceId, slabs: Iterable[SlabId]) -> Grants:
        for slab in slabs:
            self._leased[instance].remove(slab)
            self._free.append(slab)
        return self._serve()

    def lost(self, instance: InstanceId) -> Grants:
        """The instance's process is gone; the others are asked to forget it."""
        self._wanted.pop(instance, None)
        for orphans in self._orphans.values():
            orphans.answers.pop(instance, None)
        mine = self._orphans.setdefault(instance, _Orphans([], Counter()))
        mine.slabs += sorted(self._leased.pop(instance))
        mine.answers.update(list(self._leased))
        grants: Grants = [(other, ForgetPeer(instance)) for other in sorted(self._leased)]
        return grants + self._settle()

    def forgotten(self, instance: InstanceId, peer: InstanceId) -> Grants:
        """`instance` has no transfer from the lost `peer`'s slabs left."""
        self._orphans[peer].answers.subtract([instance])
        return self._settle()

    def check(self) -> None:
        places = [list(self._free), *map(list, self._leased.values()), *(o.slabs for o in self._orphans.values())]
        everything = [slab for place in places for slab in place]
        if len(everything) != self.capacity:
            raise LawBroken(f"L1: {len(everything)} slabs counted, {self.capacity} exist")
        if len(set(everything)) != len(everything):
            raise LawBroken("L2: a slab is in two places")
        if self._wanted and next(iter(self._wanted.values())) <= self.free:
            raise LawBroken(f"L3: {self.free} slabs are free, the first in line wants fewer")

    def _serve(self) -> Grants:
        grants: Grants = []
        while self._wanted:
            instance, count = next(iter(self._wanted.items()))
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
        return self._serve()
