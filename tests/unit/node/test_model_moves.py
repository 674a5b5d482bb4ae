"""A move of a model is over when every proxy has moved its requests, whoever of them is lost meanwhile."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId, ProxyId
from aegis.node.model_moves import ModelMoves
from aegis.node.proxy_links import ProxyLinks
from aegis.telemetry.metrics.moves import Cause, MoveMetrics
from aegis.telemetry.metrics.scrape import Family
from aegis.telemetry.model_counts import Tally
from aegis.transport.node_messages import ToProxy
from proxy.routing.events import ModelMoved, MoveModel, PlacesSet

M, N = ModelId("m"), ModelId("n")
ONE, TWO = InstanceId("mixed-0"), InstanceId("mixed-1")
FIRST, SECOND = ProxyId(0), ProxyId(1)
MOVE = MoveModel(M, TWO)


class End:
    """As `ProxyEnd`."""

    address = ""

    def __init__(self) -> None:
        self.told: list[ToProxy] = []

    def deliver(self, message: ToProxy) -> None:
        self.told.append(message)

    async def scrape(self) -> tuple[Family, ...]:
        return ()

    def tallies(self) -> list[Tally]:
        return []


class Stand:
    """Two proxies."""

    def __init__(self) -> None:
        self.links, self.ends = ProxyLinks(), {FIRST: End(), SECOND: End()}
        for proxy, end in self.ends.items():
            self.links.join(proxy, end)
        self.registry = CollectorRegistry()
        self.moves = ModelMoves(self.links, MoveMetrics(self.registry))

    async def begun(self, move: MoveModel = MOVE, cause: Cause = "operator") -> asyncio.Task[ModelMoved]:
        task = asyncio.create_task(self.moves.move(move, cause))
        await asyncio.sleep(0)
        return task

    def counted(self, name: str, cause: Cause = "operator", **labels: str) -> int:
        """Of M."""
        found = self.registry.get_sample_value(f"aegis:{name}_total", {"model_name": M, "cause": cause, **labels})
        return int(found or 0)

    def moves_counted(self, cause: Cause = "operator") -> list[int]:
        return [self.counted(f"model_moves_{what}", cause) for what in ("begun", "done", "failed")]


def test_it_is_over_when_all_have_answered() -> None:
    async def main() -> None:
        stand = Stand()
        task = await stand.begun()
        assert [end.told for end in stand.ends.values()] == [[MOVE], [MOVE]]
        stand.moves.answered(FIRST, ModelMoved(M, TWO, 2, 1, kv_tokens=50))
        stand.moves.answered(FIRST, ModelMoved(M, TWO, 9, 9))
        stand.moves.answered(SECOND, ModelMoved(N, TWO, 9, 9))
        await asyncio.sleep(0)
        assert not task.done()
        stand.moves.answered(SECOND, ModelMoved(M, TWO, 3, 0, "why", 7))
        assert await task == ModelMoved(M, TWO, 5, 1, "why", 57)

    asyncio.run(main())


def test_a_lost_proxy_is_not_waited_for() -> None:
    async def main() -> None:
        stand = Stand()
        task = await stand.begun()
        stand.moves.answered(FIRST, ModelMoved(M, TWO, 2, 0))
        stand.moves.left(SECOND)
        assert await task == ModelMoved(M, TWO, 2, 0)

    asyncio.run(main())


def test_a_model_moves_once_at_a_time() -> None:
    async def main() -> None:
        stand = Stand()
        task = await stand.begun()
        with pytest.raises(UserError, match="m is being moved already"):
            await stand.moves.move(MoveModel(M, ONE), "placement")
        other = await stand.begun(MoveModel(N, ONE))
        task.cancel()
        other.cancel()
        await asyncio.gather(task, other, return_exceptions=True)
        again = await stand.begun()
        assert not again.done(), "one that was given up may be ordered again"
        again.cancel()

    asyncio.run(main())


def test_a_late_answer_is_not_taken_for_that_of_the_next_move() -> None:
    async def main() -> None:
        stand = Stand()
        late = await stand.begun()
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        task = await stand.begun()
        first, second = [cast(MoveModel, told).number for told in stand.ends[FIRST].told]
        for proxy in (FIRST, SECOND):
            stand.moves.answered(proxy, ModelMoved(M, TWO, 1, 0, "another move took its place", number=first))
        await asyncio.sleep(0)
        assert not task.done()
        for proxy in (FIRST, SECOND):
            stand.moves.answered(proxy, ModelMoved(M, TWO, 2, 0, number=second))
        assert await task == ModelMoved(M, TWO, 2 * 2, 0, number=second)

    asyncio.run(main())


def test_who_joins_later_learns_where_requests_go() -> None:
    async def main() -> None:
        stand = Stand()
        task = await stand.begun()
        await stand.begun(MoveModel(N, ONE, places=(ONE, TWO)))
        assert stand.moves.places() == [PlacesSet(M, (TWO,)), PlacesSet(N, (ONE, TWO))]
        stand.moves.set_places(PlacesSet(N, ()))
        assert stand.ends[FIRST].told[-1] == PlacesSet(N, ()) and stand.moves.places() == [PlacesSet(M, (TWO,))]
        stand.moves.set_places(PlacesSet(M, (ONE,)))
        assert stand.moves.places() == [PlacesSet(M, (ONE,))]
        stand.moves.removed(M)
        assert stand.moves.places() == []
        task.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("before", [(), (ONE,)])
def test_after_a_move_that_was_not_made_requests_go_where_they_went(before: tuple[InstanceId, ...]) -> None:
    async def main() -> None:
        stand = Stand()
        stand.moves.set_places(PlacesSet(M, before))
        places = stand.moves.places()
        task = await stand.begun()
        for proxy in (FIRST, SECOND):
            stand.moves.answered(proxy, ModelMoved(M, TWO, 0, 0, "mixed-1 is not up"))
        await task
        assert stand.moves.places() == places
        assert [end.told[-1] for end in stand.ends.values()] == [PlacesSet(M, before)] * 2

    asyncio.run(main())


def test_a_model_that_was_removed_while_it_moved_has_no_places() -> None:
    async def main() -> None:
        stand = Stand()
        stand.moves.set_places(PlacesSet(M, (ONE,)))
        task = await stand.begun()
        stand.moves.removed(M)
        for proxy in (FIRST, SECOND):
            stand.moves.answered(proxy, ModelMoved(M, TWO, 0, 0, "the model was removed"))
        await task
        assert stand.moves.places() == []

    asyncio.run(main())


@pytest.mark.parametrize("cause", ["operator", "placement"])
def test_moves_and_what_went_along_are_counted_by_cause(cause: Cause) -> None:
    async def main() -> None:
        stand = Stand()
        task = await stand.begun(cause=cause)
        assert stand.moves_counted(cause) == [1, 0, 0]
        stand.moves.answered(FIRST, ModelMoved(M, TWO, 2, 1, kv_tokens=50))
        stand.moves.answered(FIRST, ModelMoved(M, TWO, 9, 9, kv_tokens=9))
        stand.moves.answered(SECOND, ModelMoved(M, TWO, 3, 0, kv_tokens=7))
        await task
        assert stand.moves_counted(cause) == [1, 1, 0]
        moved = [stand.counted("moved_requests", cause, how=how) for how in ("kv", "prefilled")]
        assert (moved, stand.counted("moved_kv_tokens", cause)) == ([5, 1], 57)

    asyncio.run(main())


def test_a_move_that_is_given_up_or_not_waited_for_has_failed() -> None:
    async def main() -> None:
        stand = Stand()
        lost = await stand.begun()
        stand.moves.answered(FIRST, ModelMoved(M, TWO, 1, 0, "mixed-1 was lost", 5))
        stand.moves.left(SECOND)
        await lost
        assert stand.moves_counted() == [1, 0, 1] and stand.counted("moved_kv_tokens") == 5
        late = await stand.begun()
        with pytest.raises(UserError):
            await stand.moves.move(MOVE, "operator")
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert stand.moves_counted() == [2, 0, 2], "one that was refused has not begun"

    asyncio.run(main())
