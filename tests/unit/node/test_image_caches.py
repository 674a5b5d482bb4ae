"""The model caches of several machines, taken together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from aegis.core.ids import InstanceId, MachineId, ModelId
from aegis.core.messages import EvictImage, ImageCached, ToInstance
from aegis.core.model import IMAGE_EXTENT_BYTES, ModelSpec
from aegis.node.image_cache import ImageCache
from aegis.node.image_caches import ImageCaches
from aegis.node.image_filler import Filled
from aegis.sim.faults.fake_models import PAGE, make_spec
from memory.image_cache import State
from memory.pages import Runs

EXTENTS = 4
ONE, TWO = MachineId("one"), MachineId("two")
A, B = InstanceId("decode-0"), InstanceId("decode-1")


def spec(number: int, extents: int) -> ModelSpec:
    made = make_spec(number, image_pages=1, block_bytes=PAGE)
    return replace(made, manifest=replace(made.manifest, image_bytes=extents * IMAGE_EXTENT_BYTES))


SMALL, LARGE = spec(0, 2), spec(1, 3)


class Filler:
    """Fills when it is told to."""

    extents = EXTENTS

    def __init__(self) -> None:
        self.under_way: dict[ModelId, asyncio.Future[Filled]] = {}

    def fill(self, spec: ModelSpec, runs: Runs) -> Awaitable[Filled]:
        filling = self.under_way[spec.model] = asyncio.get_running_loop().create_future()
        return filling

    def abandon(self, model: ModelId) -> None:
        self.under_way.pop(model).set_result(Filled(whole=False))

    async def end(self, spec: ModelSpec, damage: str = "") -> None:
        self.under_way.pop(spec.model).set_result(Filled(not damage, damage))
        for _ in range(3):
            await asyncio.sleep(0)


class Node:
    """What it hears."""

    def __init__(self) -> None:
        self.told: list[tuple[InstanceId, ToInstance]] = []
        self.forgotten: list[ModelId] = []
        self.damaged: list[tuple[ModelId, str]] = []

    def post(self, instance: InstanceId, message: ToInstance) -> None:
        self.told.append((instance, message))

    def image_forgotten(self, model: ModelId) -> None:
        self.forgotten.append(model)

    def image_damaged(self, model: ModelId, reason: str) -> None:
        self.damaged.append((model, reason))


class Stand:
    """Two machines with an instance each."""

    def __init__(self) -> None:
        self.images = ImageCaches()
        self.node = self.images.wire = Node()
        self.fillers = {machine: Filler() for machine in (ONE, TWO)}
        for machine, instance in ((ONE, A), (TWO, B)):
            self.images.open(machine, ImageCache(self.fillers[machine], check_laws=True))
            self.images.join(instance, machine)

    async def fill(self, spec: ModelSpec) -> None:
        for filler in self.fillers.values():
            await filler.end(spec)


def standing(script: Callable[[Stand], Awaitable[None]]) -> None:
    async def main() -> None:
        await script(Stand())

    asyncio.run(main())


def test_an_image_is_cached_when_each_machine_has_it_and_each_tells_its_own_instances() -> None:
    async def script(stand: Stand) -> None:
        assert stand.images.add(SMALL, pinned=False)
        await stand.fillers[ONE].end(SMALL)
        assert stand.images.state(SMALL.model) is State.FILLING
        assert [(to, type(message)) for to, message in stand.node.told] == [(A, ImageCached)]
        await stand.fillers[TWO].end(SMALL)
        assert stand.images.state(SMALL.model) is State.CACHED
        assert [to for to, _ in stand.node.told] == [A, B]
        assert stand.images.accounts()["cached"] == 4 and stand.images.counters().fills == 2

    standing(script)


def test_a_dropped_image_is_forgotten_when_every_machine_has_let_go_of_it() -> None:
    async def script(stand: Stand) -> None:
        stand.images.add(SMALL, pinned=False)
        await stand.fill(SMALL)
        stand.images.drop(SMALL.model)
        assert [(to, message) for to, message in stand.node.told[2:]] == [
            (A, EvictImage(SMALL.model)),
            (B, EvictImage(SMALL.model)),
        ]
        assert stand.images.state(SMALL.model) is State.ABSENT
        stand.images.evicted(SMALL.model, A)
        assert not stand.node.forgotten
        stand.images.lost(B)
        stand.images.close(TWO)
        assert stand.node.forgotten == [SMALL.model]
        assert stand.images.state(SMALL.model) is State.ABSENT, "it may have been asked for when it was there"

    standing(script)


def test_an_unloaded_image_leaves_every_machine_and_is_filled_again_when_it_is_used() -> None:
    async def script(stand: Stand) -> None:
        stand.images.add(SMALL, pinned=False)
        await stand.fill(SMALL)
        stand.images.unload(SMALL.model)
        assert stand.node.told[2:] == [(A, EvictImage(SMALL.model)), (B, EvictImage(SMALL.model))]
        for instance in (A, B):
            assert stand.images.evicting(SMALL.model)
            stand.images.evicted(SMALL.model, instance)
        assert not stand.images.evicting(SMALL.model) and stand.images.accounts()["free"] == 2 * EXTENTS
        assert not stand.node.forgotten and stand.images.specs() == [SMALL]
        stand.images.use(SMALL.model, 0)
        await stand.fill(SMALL)
        assert stand.images.state(SMALL.model) is State.CACHED

    standing(script)


def test_a_dropped_image_is_forgotten_where_there_is_no_machine() -> None:
    async def script(stand: Stand) -> None:
        stand.images.add(SMALL, pinned=False)
        for machine, instance in ((ONE, A), (TWO, B)):
            stand.images.lost(instance)
            stand.images.close(machine)
        stand.images.drop(SMALL.model)
        assert stand.node.forgotten == [SMALL.model]

    standing(script)


def test_pins_hold_on_every_machine_and_on_those_that_come() -> None:
    async def script(stand: Stand) -> None:
        assert stand.images.add(SMALL, pinned=True)
        assert not stand.images.add(LARGE, pinned=True), "the two do not fit together"
        assert stand.images.add(LARGE, pinned=False)
        assert not stand.images.pin(LARGE.model) and not stand.images.pinned(LARGE.model)
        stand.images.open(MachineId("three"), ImageCache(Filler(), check_laws=True))
        assert all(use.pinned is (model == SMALL.model) for model, use in stand.images.images().items())
        stand.images.unpin(SMALL.model)
        assert stand.images.pin(LARGE.model) and stand.images.pinned(LARGE.model)

    standing(script)


def test_it_is_evicting_as_long_as_any_machine_is_at_it() -> None:
    async def script(stand: Stand) -> None:
        stand.images.add(LARGE, pinned=False)
        await stand.fill(LARGE)
        assert stand.images.add(SMALL, pinned=True), "the other makes room"
        assert stand.images.evicting(LARGE.model)
        stand.images.evicted(LARGE.model, A)
        assert stand.images.state(LARGE.model) is State.ABSENT and stand.images.evicting(LARGE.model)
        stand.images.evicted(LARGE.model, B)
        assert not stand.images.evicting(LARGE.model)

    standing(script)


def test_damage_on_any_machine_is_told() -> None:
    async def script(stand: Stand) -> None:
        stand.images.add(SMALL, pinned=False)
        await stand.fillers[ONE].end(SMALL)
        await stand.fillers[TWO].end(SMALL, "its weight image is damaged")
        assert stand.node.damaged == [(SMALL.model, "its weight image is damaged")]
        assert stand.images.state(SMALL.model) is State.ABSENT

    standing(script)


def test_what_machines_counted_that_are_gone_is_not_lost() -> None:
    async def script(stand: Stand) -> None:
        stand.images.add(SMALL, pinned=False)
        await stand.fill(SMALL)
        stand.images.lost(B)
        stand.images.close(TWO)
        assert stand.images.counters().fills == 2 and stand.images.accounts()["cached"] == 2

    standing(script)
