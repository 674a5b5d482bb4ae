"""A node, and the order in which it tells of losses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, cast

from aegis.core.ids import InstanceId, ModelId, ProxyId
from aegis.core.messages import (
    AddModel,
    DropProxy,
    ForgetPeer,
    MeetProxy,
    NeedSlabs,
    ProxyDropped,
    Ready,
    ReleaseProxy,
    ToInstance,
)
from aegis.core.model import ModelSpec, Slo
from aegis.core.role import Role
from aegis.models.terms import Terms
from aegis.node.devices import Devices
from aegis.node.node import Node
from aegis.node.registration import register
from aegis.process.clock import MonotonicClock
from aegis.sim.faults.fake_models import make_spec
from aegis.telemetry.history import History
from aegis.telemetry.metrics.scrape import Family
from aegis.telemetry.model_counts import Tally
from aegis.transport.node_messages import Drain, InstanceLost, Noted, ToProxy
from memory.budget import Budget
from proxy.routing.events import ModelMoved, ModelRemoved, MoveModel, PlacesSet
from tests.parity.stand_ins import CountedPool, Processes, host, no_images

P0, D0, D1 = INSTANCES = [InstanceId(name) for name in ("prefill-0", "decode-0", "decode-1")]
HERE, THERE = ProxyId(0), ProxyId(1)
PAGE = 2 << 20


class Link:
    """As `Hub`."""

    def __init__(self) -> None:
        self.sent: list[tuple[InstanceId, ToInstance]] = []

    def send(self, identity: str, messages: Sequence[object]) -> None:
        self.sent += [(InstanceId(identity.partition("/")[0]), cast(ToInstance, message)) for message in messages]

    def of(self, kind: type[ToInstance]) -> list[tuple[InstanceId, ToInstance]]:
        return [(instance, message) for instance, message in self.sent if isinstance(message, kind)]


class End:
    """As `ProxyEnd`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.told: list[ToProxy] = []

    def deliver(self, message: ToProxy) -> None:
        self.told.append(message)

    async def scrape(self) -> tuple[Family, ...]:
        return ()

    def tallies(self) -> list[Tally]:
        return [Tally(ModelId("m"), waiting=1, arrived=4)]


class Stand:
    """Two proxies; all instances are up."""

    def __init__(self) -> None:
        self.link = Link()
        self.built: list[ModelSpec] = []
        budget = Budget(pages=8, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=8, instances=len(INSTANCES))
        clock = MonotonicClock()
        devices = Devices([CountedPool(8, PAGE)], dict.fromkeys(INSTANCES, 0), clock, floor_bytes=0, idle_s=1000.0)
        self.node = Node(
            budget,
            no_images(),
            host(budget),
            devices,
            cast(Any, self.link),
            clock,
            History(spans=0, records=0, decisions=0, token_times=False),
            policy="aegaeon",
            terms=Terms("", "float32"),
            default_slo=Slo(),
            register=partial(register, fork_server=cast(Any, None)),  # no model is added
            check_laws=True,
            build_before=self.built.append,
        )
        self.node.pool = cast(Any, Processes(dict.fromkeys(INSTANCES, Role.DECODE) | {P0: Role.PREFILL}))
        self.ends = {HERE: End("ipc://here"), THERE: End("ipc://there")}
        self.node.join(HERE, self.ends[HERE])
        for instance in INSTANCES:
            self.hear(instance, Ready(1))
        self.node.join(THERE, self.ends[THERE])

    def hear(self, instance: InstanceId, message: Any) -> None:
        self.node._on_instance_message(instance, message)
        self.node._outbox.flush()


def standing(work: Callable[[Stand], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await work(Stand())

    asyncio.run(main())


def test_a_model_that_is_added_is_built_for_instances_that_start_later() -> None:
    async def work(stand: Stand) -> None:
        spec = make_spec(0, image_pages=1, block_bytes=128)
        stand.node.broadcast(AddModel(spec))
        assert stand.built == [spec] and [instance for instance, _ in stand.link.of(AddModel)] == list(stand.node.up)

    standing(work)


def test_instances_meet_every_proxy_whoever_came_first() -> None:
    async def work(stand: Stand) -> None:
        met = [
            (instance, MeetProxy(proxy, stand.ends[proxy].address)) for proxy in (HERE, THERE) for instance in INSTANCES
        ]
        assert sorted(stand.link.of(MeetProxy), key=str) == sorted(met, key=str)

    standing(work)


def test_a_proxy_that_joins_a_server_that_is_ending_takes_no_requests() -> None:
    async def work(stand: Stand) -> None:
        stand.node.drain(20.0)
        late = End("ipc://late")
        stand.node.join(ProxyId(2), late)
        assert late.told.count(Drain(0.0)) == 1 and Drain(20.0) in stand.ends[THERE].told

    standing(work)


def test_what_was_handed_over_is_released_when_all_have_dropped_the_proxy() -> None:
    async def work(stand: Stand) -> None:
        stand.node.leave(THERE)
        assert sorted(stand.link.of(DropProxy), key=str) == [(i, DropProxy(THERE)) for i in sorted(INSTANCES)]
        stand.hear(P0, ProxyDropped(THERE))
        stand.hear(D0, ProxyDropped(THERE))
        assert not stand.link.of(ReleaseProxy)
        await lost(stand, D1, noted_by=[HERE])
        assert sorted(stand.link.of(ReleaseProxy), key=str) == [(i, ReleaseProxy(THERE)) for i in (D0, P0)]

    standing(work)


async def lost(stand: Stand, instance: InstanceId, *, noted_by: Sequence[ProxyId]) -> None:
    task = asyncio.create_task(stand.node.lost(instance, 1))
    await asyncio.sleep(0)
    for proxy in noted_by:
        assert stand.ends[proxy].told[-1] == InstanceLost(instance, 1)
        assert not stand.link.of(ForgetPeer)
        stand.node.on_proxy_message(proxy, Noted(instance, 1))
        await asyncio.sleep(0)
    await task


def test_instances_learn_of_a_loss_after_all_proxies() -> None:
    async def work(stand: Stand) -> None:
        stand.hear(P0, NeedSlabs(2))
        await lost(stand, P0, noted_by=[HERE, THERE])
        assert sorted(stand.link.of(ForgetPeer), key=str) == [
            (i, ForgetPeer(P0, stand.node.pool.words(P0))) for i in (D0, D1)
        ]

    standing(work)


def test_a_lost_proxy_is_not_waited_for_in_a_move_and_one_that_joins_learns_of_it() -> None:
    async def main(stand: Stand) -> None:
        model = ModelId("m")
        moving = asyncio.create_task(stand.node.moves.move(MoveModel(model, D1), "operator"))
        await asyncio.sleep(0)
        assert stand.ends[THERE].told[-1] == MoveModel(model, D1)
        stand.node.on_proxy_message(HERE, ModelMoved(model, D1, 2, 0))
        stand.node.leave(THERE)
        assert await moving == ModelMoved(model, D1, 2, 0)
        again = End("ipc://again")
        stand.node.join(ProxyId(2), again)
        assert PlacesSet(model, (D1,)) in again.told
        stand.node.notify_proxies(ModelRemoved(model))
        assert stand.node.moves.places() == []

    standing(main)
