"""The sources of slabs: pages of the device that are mapped while a slab is held, and leases of the node.

The lowest slab is taken first: neighbours make long runs of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final

from aegis.core.effects import Effect, MapKv, UnmapKv
from aegis.core.ids import SlabId
from memory.pages import NoPages, PagePool, Runs

_KV_OWNER: Final = "(kv)"  # no model is named so


class DeviceSlabs:
    """Slabs of the device's KV range, `count` of which have addresses, backed by pages from the pool while held."""

    def __init__(self, pool: PagePool, count: int, pages_per_slab: int, effects: list[Effect]) -> None:
        self._pool, self._size, self._effects = pool, pages_per_slab, effects
        self._slots = [SlabId(slot) for slot in range(count)]  # a heap
        self._pages: dict[SlabId, Runs] = {}

    def available(self) -> int:
        return self._pool.free // self._size

    def take(self) -> SlabId:
        slab = heappop(self._slots)
        runs = self._pool.take(_KV_OWNER, self._size, high=True)
        assert not isinstance(runs, NoPages)
        self._pages[slab] = runs
        self._effects.append(MapKv(slab, runs))
        return slab

    def give(self, slab: SlabId) -> None:
        self._pool.give(_KV_OWNER, self._pages.pop(slab))
        heappush(self._slots, slab)
        self._effects.append(UnmapKv(slab))

    @property
    def pages(self) -> int:
        return len(self._pages) * self._size


class LeasedSlabs:
    """Slabs of the node's host region that are leased to this instance."""

    def __init__(self) -> None:
        self._idle: list[SlabId] = []  # a heap
        self.leased: set[SlabId] = set()

    def available(self) -> int:
        return len(self._idle)

    def take(self) -> SlabId:
        return heappop(self._idle)

    def give(self, slab: SlabId) -> None:
        heappush(self._idle, slab)

    def grant(self, slabs: Iterable[SlabId]) -> None:
        for slab in slabs:
            assert slab not in self.leased
            self.leased.add(slab)
            heappush(self._idle, slab)

    def surplus(self, keep: int) -> tuple[SlabId, ...]:
        """Idle slabs beyond `keep`, no longer ours."""
        if len(self._idle) <= keep:
            return ()
        gone = tuple(self._idle.pop() for _ in range(len(self._idle) - keep))  # the last of a heap may go
        self.leased.difference_update(gone)
        return gone
