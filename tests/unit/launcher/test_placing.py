"""Placement goes on whatever becomes of a move that it has ordered."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aegis.core.estimators import Hardware
from aegis.core.ids import ModelId
from aegis.launcher.placing import Placing
from proxy.routing.events import ModelMoved, MoveModel, PlacesSet
from proxy.routing.placement import PoolSampled
from proxy.routing.placement_views import Change, InstanceView, PlacedLoad, PlacementRules
from proxy.routing.pool_sample import ModelSample
from tests.unit.node.test_node import D0, D1, HERE, THERE, Stand
from tests.unit.proxy.routing.test_placement import Wishes

M = ModelId("m")
SAMPLE = ModelSample(M, 1000, 10, 10**8, 0, 0, 10**6, 10**9)
POOL = PoolSampled(
    (SAMPLE,), (InstanceView(D0, (0,), 10**6, (PlacedLoad(M, 2, 50, 0, 0, 0),)), InstanceView(D1, (1,), 10**6, ()))
)


def test_a_move_that_is_refused_ends_and_undoes_nothing_of_the_one_under_way() -> None:
    async def main() -> None:
        stand = Stand()
        moves = stand.node.moves
        ordered = asyncio.create_task(moves.move(MoveModel(M, D0), "operator"))
        await asyncio.sleep(0)
        policy = Wishes(PlacementRules(settled_ns=0), [Change(M, (D1,), moves=True, because="so", source=D0)])
        placing = Placing(stand.node, cast(Any, None), policy, Hardware(), stand.node.clock)
        placing._on(POOL)
        assert placing._moving
        await placing._moving
        assert moves.places() == [PlacesSet(M, (D0,))] and not ordered.done()
        for proxy in (HERE, THERE):
            stand.node.on_proxy_message(proxy, ModelMoved(M, D0, 1, 0))
        await ordered
        placing._on(POOL)
        await asyncio.sleep(0)
        assert moves.places() == [PlacesSet(M, (D1,))], "the next one begins"
        placing._moving.cancel()

    asyncio.run(main())
