"""Host KV slabs of the node, leased to its instances: one owner of the accounts, blocks counted by the lessee.

Leasing by slab keeps the token path free of messages: an instance asks rarely and allocates blocks on its own. What
cannot be granted at once is refused at once (the asker may then give KV up) and also remembered: slabs that come back
go to the instances that still want some, first come first served.

When an instance is lost its slabs may still be read by others' swap-ins. They are free again once every live instance
has said that it has no transfer from them left.

Laws: (L1) free + leased + orphaned == capacity; (L2) a slab is in one place only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, SlabId
from aegis.core.messages import ForgetPeer, GrantSlabs


@dataclass(slots=True)
class _Orphans:
    slabs: list[SlabId]
    waiting_for: set[InstanceId] = field(default_factory=set)


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

    def join(self, instance: InstanceId) -> None:
        assert instance not in self._leased
        self._leased[instance] = set()

    def ask(self, instance: InstanceId, count: int) -> Grants:
        """Grants what there is; `refused` where that is less than `count`."""
        grant = self._grant(instance, min(count, len(self._free)))
        short = count - len(grant)
        if short:
            self._wanted[instance] = short
        return [(instance, GrantSlabs(grant, refused=short > 0))]

    def give_back(self, instance: InstanceId, slabs: Iterable[SlabId]) -> Grants:
        for slab in slabs:
            self._leased[instance].remove(slab)
            self._free.append(slab)
        return self._serve()

    def lost(self, instance: InstanceId) -> Grants:
        """The instance's process is gone; the others are asked to forget it."""
        slabs = sorted(self._leased.pop(instance, ()))
        self._wanted.pop(instance, None)
        for orphans in self._orphans.values():
            orphans.waiting_for.discard(instance)
        others = set(self._leased)
        previous = self._orphans.pop(instance, None)
        if previous:
            slabs += previous.slabs
        self._orphans[instance] = _Orphans(slabs, set(others))
        grants: Grants = [(other, ForgetPeer(instance)) for other in sorted(others)]
        return grants + self._settle()

    def forgotten(self, instance: InstanceId, peer: InstanceId) -> Grants:
        """`instance` has no transfer from the lost `peer`'s slabs left."""
        if peer in self._orphans:
            self._orphans[peer].waiting_for.discard(instance)
        return self._settle()

    def check(self) -> None:
        places = [list(self._free), *map(list, self._leased.values()), *(o.slabs for o in self._orphans.values())]
        everything = [slab for place in places for slab in place]
        if len(everything) != self.capacity:
            raise LawBroken(f"L1: {len(everything)} slabs counted, {self.capacity} exist")
        if len(set(everything)) != len(everything):
            raise LawBroken("L2: a slab is in two places")

    def _grant(self, instance: InstanceId, count: int) -> tuple[SlabId, ...]:
        slabs = tuple(self._free.pop() for _ in range(count))
        self._leased[instance].update(slabs)
        return slabs

    def _serve(self) -> Grants:
        grants: Grants = []
        while self._free and self._wanted:
            instance, wanted = next(iter(self._wanted.items()))
            del self._wanted[instance]
            grant = self._grant(instance, min(wanted, len(self._free)))
            if wanted > len(grant):
                self._wanted[instance] = wanted - len(grant)
            grants.append((instance, GrantSlabs(grant)))
        return grants

    def _settle(self) -> Grants:
        for peer in [p for p, orphans in self._orphans.items() if not orphans.waiting_for]:
            self._free += self._orphans.pop(peer).slabs
        return self._serve()
