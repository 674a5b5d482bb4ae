"""Placement goes on whatever becomes of a move that it has ordered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId
from aegis.core.model import ModelSpec
from aegis.launcher.placing import Placing
from aegis.sim.faults.fake_models import make_adapter, make_spec
from aegis.telemetry.model_counts import Tally
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


class Served:
    """A node of these models, and the core of the proxy beside it. `tallies` is what its proxies have counted."""

    def __init__(self, *specs: ModelSpec) -> None:
        self.stand, self.specs, self.tallies = Stand(), specs, list[Tally]()
        self.stand.node.catalogue = cast(Any, self)
        self.stand.ends[HERE].tallies = lambda: self.tallies  # type: ignore[method-assign]
        self.stand.ends[THERE].tallies = list  # type: ignore[method-assign]
        self.placing = Placing(self.stand.node, cast(Any, self), None, Hardware(), self.stand.node.clock)

    def models(self) -> dict[ModelId, Any]:
        return {spec.model: SimpleNamespace(spec=spec) for spec in self.specs}

    def sample(self) -> tuple[tuple[ModelSample, ...], dict[InstanceId, tuple[PlacedLoad, ...]]]:
        bases = [ModelSample(spec.model, 1, 1, 1, 0, 0, 1, 1) for spec in self.specs if not spec.base]
        return tuple(bases), {D0: (), D1: ()}

    def came(self) -> list[tuple[ModelId, int, int]]:
        return [(each.model, each.requests, each.prompt_tokens) for each in self.placing._sample().models]


BASE = make_spec(0, image_pages=1, block_bytes=128)
ADAPTER = make_adapter(1, BASE)


def test_requests_for_adapters_come_for_their_base_and_do_not_go_with_them() -> None:
    served = Served(BASE, ADAPTER)
    served.tallies = [Tally(ADAPTER.model, arrived=4, prompt_tokens=400)]
    assert served.came() == [(BASE.model, 4, 400)]
    served.tallies += [Tally(BASE.model, arrived=1, prompt_tokens=10)]
    assert served.came() == [(BASE.model, 5, 410)]
    served.specs = (BASE,)
    assert served.came() == [(BASE.model, 5, 410)]


def test_what_came_before_a_model_was_away_came_long_ago() -> None:
    served = Served(BASE)
    served.tallies = [Tally(BASE.model, arrived=4, prompt_tokens=400)]
    served.came()
    served.specs = ()
    served.came()
    served.specs = (BASE,)
    served.tallies = [Tally(BASE.model, arrived=5, prompt_tokens=500)]
    assert served.came() == [(BASE.model, 1, 100)]
