"""Slabs come from the pool while they are held, or from the node's leases."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.effects import Effect, MapKv, UnmapKv
from aegis.core.ids import PageRun, SlabId
from memory.pages import NoPages, PagePool, Runs, count_pages
from memory.slab_sources import DeviceSlabs, LeasedSlabs

SIZE, COUNT = 3, 4
PAGES = SIZE * COUNT


class OnDevice(RuleBasedStateMachine):
    """Beside a dictionary from slab to its pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool([PageRun(0, PAGES)])
        self.effects: list[Effect] = []
        self.slabs = DeviceSlabs(self.pool, COUNT, SIZE, self.effects)
        self.mapped: dict[SlabId, Runs] = {}
        self.others: list[Runs] = []

    @rule()
    def take(self) -> None:
        if not self.slabs.available():
            return
        slab = self.slabs.take()
        assert slab == min(set(range(COUNT)) - self.mapped.keys()), "the lowest place among the addresses"
        self.settle()
        assert slab in self.mapped

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        if self.mapped:
            slab = data.draw(st.sampled_from(sorted(self.mapped)))
            self.slabs.give(slab)
            self.settle()
            assert slab not in self.mapped

    @rule(count=st.integers(1, 4), give=st.booleans())
    def others_use_the_pool(self, count: int, give: bool) -> None:
        if give and self.others:
            self.pool.give("m", self.others.pop())
        elif not give:
            taken = self.pool.take("m", count)
            self.others += [] if isinstance(taken, NoPages) else [taken]

    def settle(self) -> None:
        for effect in self.effects:
            match effect:
                case MapKv(slab, runs):
                    assert count_pages(runs) == SIZE
                    self.mapped[slab] = runs
                case UnmapKv(slab):
                    del self.mapped[slab]
        self.effects.clear()

    @invariant()
    def what_is_mapped_is_what_is_booked(self) -> None:
        self.pool.check()
        assert self.slabs.pages == len(self.mapped) * SIZE
        assert self.slabs.available() == self.pool.free // SIZE
        assert self.pool.used == self.slabs.pages + sum(map(count_pages, self.others))


TestOnDevice = OnDevice.TestCase


class Leased(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slabs = LeasedSlabs()
        self.node, self.idle, self.taken = [SlabId(i) for i in range(8)], set[SlabId](), set[SlabId]()

    @rule(count=st.integers(0, 3))
    def grant(self, count: int) -> None:
        more, self.node = self.node[:count], self.node[count:]
        self.slabs.grant(more)
        self.idle |= set(more)

    @rule()
    def take(self) -> None:
        if self.slabs.available():
            slab = self.slabs.take()
            assert slab == min(self.idle)
            self.idle.remove(slab)
            self.taken.add(slab)

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        if self.taken:
            slab = data.draw(st.sampled_from(sorted(self.taken)))
            self.slabs.give(slab)
            self.taken.remove(slab)
            self.idle.add(slab)

    @rule(keep=st.integers(0, 3))
    def surplus(self, keep: int) -> None:
        gone = self.slabs.surplus(keep)
        assert len(gone) == max(len(self.idle) - keep, 0)
        self.idle -= set(gone)
        self.node += gone

    @invariant()
    def what_is_leased_is_idle_or_taken(self) -> None:
        assert self.slabs.leased == self.idle | self.taken and not self.idle & self.taken
        assert self.slabs.available() == len(self.idle)


TestLeased = Leased.TestCase
