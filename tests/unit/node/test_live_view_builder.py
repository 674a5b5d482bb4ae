"""The live view of a node shows what it has."""

from __future__ import annotations

from typing import Any

import msgspec

from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import Telemetry
from aegis.node.queries import NodeQueries
from aegis.telemetry.live_view import Live, SeenUntil
from tests.unit.node.test_node import D0, INSTANCES, Stand, standing

M = ModelId("m")


async def live(queries: NodeQueries, **seen: Any) -> Live:
    return msgspec.json.decode(await queries.live(SeenUntil(**seen)), type=Live)


def test_an_instance_is_told_as_it_last_said() -> None:
    async def work(stand: Stand) -> None:
        queries = NodeQueries(stand.node)
        stand.hear(D0, Telemetry(M, (M,), 3, 2, {}, {}, loading=(ModelId("n"),)))
        told = {each.instance: each for each in (await live(queries)).instances}
        assert list(told) == INSTANCES
        there = told[D0]
        assert (there.state, there.model, there.queued, there.running) == ("up", M, 3, 2)
        assert (there.resident, there.loading, there.device) == ((M,), (ModelId("n"),), 0)
        assert told[InstanceId("decode-1")].model is None

    standing(work)


def test_a_start_has_a_number_of_its_own_and_time_goes_on() -> None:
    async def work(stand: Stand) -> None:
        queries = NodeQueries(stand.node)
        first, second = await live(queries), await live(queries)
        assert first.start == second.start
        assert first.now_ns < second.now_ns
        assert (await live(NodeQueries(stand.node))).start != first.start

    standing(work)
