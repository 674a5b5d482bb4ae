"""Large bodies are in hand a few at a time, and those that wait are read in their turn."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from aegis.core.errors import UserError
from proxy.http.security import large_bodies
from proxy.http.security.large_bodies import LARGE_BYTES_MAX, WAITING_MAX, LargeBodies, release
from tests.unit.proxy.http.scripted import calling, market, says

MIB = 1 << 20


def scopes(count: int) -> list[dict[str, Any]]:
    return [{"state": {}} for _ in range(count)]


def test_no_more_wait_than_their_buffers_may_take() -> None:
    """Half of them of one caller."""

    async def main() -> None:
        bodies, (first, *others) = LargeBodies(MIB), scopes(WAITING_MAX + 3)
        await bodies.hold(first, "a", LARGE_BYTES_MAX)
        waiting = []
        for caller in "ab":
            own = [others.pop() for _ in range(WAITING_MAX // 2)]
            waiting += [asyncio.create_task(bodies.hold(scope, caller, MIB)) for scope in own]
            await asyncio.sleep(0)
            with pytest.raises(UserError) as refused:
                await bodies.hold(others[-1], caller, MIB)
            assert refused.value.status == 503
        with pytest.raises(UserError):
            await bodies.hold(others[-1], "c", MIB)
        for task in waiting:
            task.cancel()

    asyncio.run(main())


def test_who_waits_goes_on_in_order_when_there_is_room() -> None:
    async def main() -> None:
        bodies, (first, second, third, fourth) = LargeBodies(MIB), scopes(4)
        await bodies.hold(first, "a", LARGE_BYTES_MAX - MIB)
        begun: list[int] = []

        async def hold(number: int, scope: dict[str, Any], nbytes: int) -> None:
            await bodies.hold(scope, "a", nbytes)
            begun.append(number)

        waiting = [asyncio.create_task(hold(2, second, 2 * MIB)), asyncio.create_task(hold(3, third, MIB))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert begun == [], "a small one does not pass a large one for ever"
        release(first)
        release(first)
        await asyncio.gather(*waiting)
        assert begun == [2, 3]
        for scope in (second, third):
            release(scope)
        await bodies.hold(fourth, "a", LARGE_BYTES_MAX)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_who_leaves_while_it_waits_takes_nothing() -> None:
    async def main() -> None:
        bodies, (first, second, third) = LargeBodies(MIB), scopes(3)
        await bodies.hold(first, "a", LARGE_BYTES_MAX)
        leaving = asyncio.create_task(bodies.hold(second, "a", MIB))
        staying = asyncio.create_task(bodies.hold(third, "a", LARGE_BYTES_MAX))
        await asyncio.sleep(0)
        leaving.cancel()
        release(first)
        await staying
        with pytest.raises(asyncio.CancelledError):
            await leaving

    asyncio.run(asyncio.wait_for(main(), 10))


def test_callers_take_turns_however_many_bodies_one_of_them_sends() -> None:
    async def main() -> None:
        bodies, begun = LargeBodies(4 * MIB), list[str]()
        first, second = scopes(2)
        await bodies.hold(first, "busy", 4 * MIB)
        await bodies.hold(second, "honest", 4 * MIB)

        async def hold(caller: str, scope: dict[str, Any], nbytes: int) -> None:
            await bodies.hold(scope, caller, nbytes)
            begun.append(caller)
            await asyncio.sleep(0)
            release(scope)

        callers = ["busy"] * 6 + ["honest", "other"]
        waiting = [asyncio.create_task(hold(name, {"state": {}}, 4 * MIB)) for name in callers]
        await asyncio.sleep(0)
        release(second)
        await asyncio.sleep(0)
        release(first)
        await asyncio.gather(*waiting)
        assert sorted(begun[:3]) == ["busy", "honest", "other"]
        assert begun[3:] == ["busy"] * 5

    asyncio.run(asyncio.wait_for(main(), 10))


def test_one_caller_leaves_room_for_others() -> None:
    async def main() -> None:
        bodies, (slow, more, other) = LargeBodies(4 * MIB), scopes(3)
        await bodies.hold(slow, "slow", 3 * MIB)
        waiting = asyncio.create_task(bodies.hold(more, "slow", 3 * MIB))
        await bodies.hold(other, "other", 4 * MIB)
        assert not waiting.done()
        release(other)
        await asyncio.sleep(0)
        assert not waiting.done(), "it has its share"
        release(slow)
        await waiting

    asyncio.run(asyncio.wait_for(main(), 10))


def test_nobody_waits_for_ever() -> None:
    async def main() -> None:
        bodies, (first, second) = LargeBodies(MIB, wait_s=0.01), scopes(2)
        await bodies.hold(first, "a", LARGE_BYTES_MAX)
        with pytest.raises(UserError, match="too many large bodies") as caught:
            await bodies.hold(second, "a", MIB)
        assert caught.value.status == 503

    asyncio.run(main())


def test_there_is_room_for_the_largest_body_there_may_be() -> None:
    asyncio.run(asyncio.wait_for(LargeBodies(4 * LARGE_BYTES_MAX).hold(*scopes(1), "a", 4 * LARGE_BYTES_MAX), 10))


@pytest.mark.parametrize("is_chunked", [False, True])
def test_all_of_many_large_bodies_are_answered(is_chunked: bool) -> None:
    body = json.dumps({"model": "m", "prompt": "x", "user": None} | {"stop": None}).encode() + b" " * (3 * MIB)

    async def pieces() -> Any:
        for start in range(0, len(body), MIB):
            yield body[start : start + MIB]

    async def call(client: httpx.AsyncClient) -> list[int]:
        asking = [client.post("/v1/completions", content=pieces() if is_chunked else body) for _ in range(8)]
        return [reply.status_code for reply in await asyncio.gather(*asking)]

    assert calling(market(says("x")), call) == [200] * 8


def test_a_large_body_has_to_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_bodies, "SEND_S", 0.05)
    monkeypatch.setattr(large_bodies, "SEND_BYTES_PER_S", 1 << 30)

    async def pieces() -> Any:
        yield b" " * MIB
        await asyncio.Event().wait()

    async def call(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", content=pieces(), headers={"content-length": str(2 * MIB)})

    reply = calling(market(), call)
    assert (reply.status_code, reply.json()["error"]["code"]) == (408, "request_timeout")
