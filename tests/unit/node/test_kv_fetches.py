"""KV on its way between machines: who waits is answered once, and nothing is written to the blocks of who is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aegis.core.ids import InstanceId, MachineId, RequestId
from aegis.core.messages import FetchKv, KvFetched
from aegis.core.request import EventHandle, KvHandle
from aegis.node.kv_fetches import Fetches

A, B = InstanceId("decode-0"), InstanceId("decode-1")
HERE = MachineId("here")


def wanted(request: int) -> FetchKv:
    kv = KvHandle(InstanceId("prefill-0"), (), 1, EventHandle(0, 1), MachineId("there"))
    return FetchKv(RequestId(request), 1, kv, (), 4096)


class Road:
    """Brings what is wanted when it is told to."""

    def __init__(self) -> None:
        self.under_way: dict[RequestId, asyncio.Future[str]] = {}

    async def fetch(self, wanted: FetchKv, into: MachineId) -> str:
        assert into == HERE
        self.under_way[wanted.request] = asyncio.get_running_loop().create_future()
        return await self.under_way[wanted.request]

    def end(self, request: int, reason: str = "") -> None:
        self.under_way[RequestId(request)].set_result(reason)


Answers = list[tuple[InstanceId, KvFetched]]


def fetching(script: Callable[[Fetches, Road, Answers], Awaitable[None]]) -> None:
    async def main() -> None:
        road, answers = Road(), Answers()
        await script(Fetches(road, lambda instance, answer: answers.append((instance, answer))), road, answers)

    asyncio.run(main())


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_each_is_answered_when_its_own_has_ended_and_with_the_reason() -> None:
    async def script(fetches: Fetches, road: Road, answers: Answers) -> None:
        for request, instance in ((1, A), (2, B)):
            fetches.begin(instance, HERE, wanted(request))
        await settle()
        assert not answers
        road.end(2, "damaged")
        await settle()
        assert answers == [(B, KvFetched(RequestId(2), 1, "damaged"))]
        road.end(1)
        await settle()
        assert answers[1:] == [(A, KvFetched(RequestId(1), 1))]

    fetching(script)


def test_who_is_lost_is_waited_for_and_not_answered() -> None:
    async def script(fetches: Fetches, road: Road, answers: Answers) -> None:
        for request, instance in ((1, A), (2, A), (3, B)):
            fetches.begin(instance, HERE, wanted(request))
        await settle()
        losing = asyncio.create_task(fetches.lost(A))
        road.end(1)
        await settle()
        assert not losing.done(), "its blocks are still written to"
        road.end(2, "silent")
        await losing
        road.end(3)
        await settle()
        assert answers == [(B, KvFetched(RequestId(3), 1))]

    fetching(script)


def test_who_came_back_is_answered_again() -> None:
    async def script(fetches: Fetches, road: Road, answers: Answers) -> None:
        await fetches.lost(A)
        fetches.begin(A, HERE, wanted(1))
        await settle()
        road.end(1)
        await settle()
        assert answers == [(A, KvFetched(RequestId(1), 1))]

    fetching(script)
