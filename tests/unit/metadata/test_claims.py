"""Claims that come together go together, and each is answered as if it were alone."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from aegis.core.errors import UserError
from aegis.core.request import FinishReason
from aegis.metadata.recording import Recording
from aegis.metadata.store import Store
from proxy.http.call_records import RecordedCall
from proxy.http.market import Delta, Finished
from tests.redis_server import RedisServer
from tests.unit.metadata.proxies import KEYS, asked, die, proxy, read, tokens, until, written

AT_ONCE = 256


class Commands:
    """Those with claims that a store sends from now on: how many claims each has, and what the next one breaks with."""

    def __init__(self, store: Store) -> None:
        self.sizes: list[int] = []
        self.bug: Exception | None = None
        claims: Any = store.records._claims
        self._script = claims._script
        claims._script = self._send

    async def _send(self, keys: list[str], args: list[Any]) -> Any:
        self.sizes.append(len(keys) // 2)
        if self.bug:
            bug, self.bug = self.bug, None
            raise bug
        return await self._script(keys=keys, args=args)


def own(request: str, seed: int = 7, fingerprint: str = "") -> RecordedCall:
    """No two requests have one fingerprint."""
    return asked(request, seed=seed, fingerprint=fingerprint or f"of {request}")


async def claimed(store: Store, *requests: str) -> list[asyncio.Task[Recording]]:
    """They wait for their answers now."""
    tasks = [asyncio.create_task(store.records.open(own(request, seed=len(request)))) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def outcomes(store: Store, *requests: str) -> dict[str, Recording | BaseException]:
    answers = await asyncio.gather(*await claimed(store, *requests), return_exceptions=True)
    return dict(zip(requests, answers, strict=True))


async def state_is(client: Redis, request: str, state: bytes) -> None:
    async with asyncio.timeout(20):
        while await client.hget(KEYS.request(f"/{request}"), "state") != state:
            await asyncio.sleep(0.002)


def code(outcome: Recording | BaseException) -> str | None:
    assert isinstance(outcome, UserError)
    return outcome.code


def test_claims_that_come_while_one_is_on_its_way_go_together(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store, Redis.from_url(redis.url) as client:
            await store.records.open(asked())
            commands = Commands(store)
            redis.pause()
            first = await claimed(store, "first")
            await until(lambda: commands.sizes == [1])
            rest = await claimed(store, *(f"r{number}" for number in range(AT_ONCE + 40)))
            redis.resume()
            calls = await asyncio.gather(*first, *rest)
            assert commands.sizes == [1, AT_ONCE, 40]
            owners = {await client.hget(KEYS.request(call.call.key), "owner") for call in calls}
            assert owners == {await client.hget(KEYS.request("/r"), "owner")}

    asyncio.run(main())


def test_a_claim_does_not_wait_for_others_to_come(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store:
            commands = Commands(store)
            claiming = asyncio.create_task(store.records.open(asked()))
            for _ in range(2):  # turns of the loop: the caller's, the sender's
                await asyncio.sleep(0)
            assert commands.sizes == [1]
            await claiming

    asyncio.run(main())


def test_each_claim_of_a_command_gets_its_own_answer(redis: RedisServer) -> None:
    async def prepare(dead: Store) -> None:
        for request, said in (("finished", [Finished(FinishReason.STOP)]), ("cancelled", []), ("left", [])):
            call = await dead.records.open(own(request, seed=50))
            await read(call, Delta(tokens(len(request))), *said)
            if request != "left":
                call.close()
        await written(dead)
        await die(redis, dead)

    async def main() -> None:
        async with proxy(redis) as dead:
            await prepare(dead)
            async with proxy(redis) as other, proxy(redis) as store:
                running = await other.records.open(own("running"))
                await other.records.open(own("another", fingerprint="g"))
                commands = Commands(store)
                told = await outcomes(store, "new", "finished", "running", "cancelled", "another", "left", "newer")
                assert commands.sizes == [len(told)]
                assert code(told["running"]) == "request_in_flight"
                assert code(told["another"]) == "request_id_reused"
                recorded = {"finished": (50, None), "cancelled": (50, (9,)), "left": (50, (4,))}
                for request, expected in ({"new": (3, ()), "newer": (5, ())} | recorded).items():
                    call = told[request]
                    assert isinstance(call, Recording)
                    assert (call.call.request, call.seed, (await read(call)).sent) == (request, *expected)
                assert (store.records.counters.replayed, store.records.counters.taken_over) == (1, 2)
                running.close()

    asyncio.run(main())


def test_a_record_that_cannot_be_claimed_does_not_disturb_the_others(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis, wait_s=0.5) as store, Redis.from_url(redis.url) as client:
            await client.set(KEYS.request("/broken"), "of a foreign type")
            commands = Commands(store)
            told = await outcomes(store, "before", "broken", "after")
            assert isinstance(told["before"], Recording)
            assert isinstance(told["after"], Recording)
            assert code(told["broken"]) == "store_unavailable"
            assert commands.sizes[0] == 3
            assert len(commands.sizes) > 1
            assert set(commands.sizes[1:]) == {1}

    asyncio.run(main())


def test_who_leaves_does_not_disturb_the_others(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store, Redis.from_url(redis.url) as client:
            await store.records.open(asked())
            commands = Commands(store)
            redis.pause()
            leaver, stayer = await claimed(store, "leaver", "stayer")
            await until(lambda: commands.sizes == [2])
            late_leaver, late_stayer = await claimed(store, "late leaver", "late stayer")
            leaver.cancel()
            late_leaver.cancel()
            await asyncio.wait((leaver, late_leaver))
            assert (leaver.cancelled(), late_leaver.cancelled()) == (True, True)
            (again,) = await claimed(store, "leaver")
            redis.resume()
            await asyncio.gather(stayer, late_stayer, again)
            assert commands.sizes == [2, 2]
            assert not await client.exists(KEYS.request("/late leaver"))

    asyncio.run(main())


def test_what_a_failed_command_claimed_is_claimed_again(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with proxy(redis, wait_s=20) as store:
            await store.records.open(asked())
            commands = Commands(store)
            redis.pause()
            claiming = await claimed(store, "a", "b", "c")
            await until(lambda: commands.sizes == [3])
            late, leaver = await claimed(store, "late", "leaver")
            redis.kill()
            await until(lambda: not store.membership.up.is_set())
            leaver.cancel()
            redis.start()
            calls = await asyncio.gather(*claiming, late)
            assert [call.call.request for call in calls] == ["a", "b", "c", "late"]
            assert commands.sizes == [3, 4]

    with caplog.at_level(logging.DEBUG, logger="aegis.metadata"):
        asyncio.run(main())
    assert "claim" in {record.__dict__.get("fields", {}).get("what") for record in caplog.records}


def test_what_was_claimed_for_nobody_is_given_back(redis: RedisServer) -> None:
    """The server stands still until the proxy has told the client to try again, and carries the claim out then."""

    async def main() -> None:
        async with proxy(redis, wait_s=0.3) as store, proxy(redis) as other:
            await store.records.open(own("kept"))
            commands = Commands(store)
            redis.pause()
            (slow,) = await claimed(store, "slow")
            await until(lambda: commands.sizes == [1])
            (waiting,) = await claimed(store, "not sent")
            refused = await asyncio.gather(slow, waiting, return_exceptions=True)
            assert [code(outcome) for outcome in refused] == ["store_unavailable"] * 2
            redis.resume()
            async with Redis.from_url(redis.url) as client:
                await state_is(client, "slow", b"cancelled")
                assert not await client.exists(KEYS.request("/not sent"))
                assert await client.hget(KEYS.request("/kept"), "state") == b"running"
            assert [(await other.records.open(own(request))).call.request for request in ("slow", "not sent")]

    asyncio.run(main())


def test_who_leaves_as_the_answer_comes_leaves_nothing_claimed(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store:
            claims: Any = store.records._claims
            (leaver,) = await claimed(store, "r")
            answered = claims._answered

            def answer(*words: Any) -> None:
                answered(*words)
                leaver.cancel()

            claims._answered = answer
            assert await asyncio.gather(leaver, return_exceptions=True) != [None]
            assert leaver.cancelled()
            async with Redis.from_url(redis.url) as client:
                await state_is(client, "r", b"cancelled")

    asyncio.run(main())


def test_what_is_claimed_again_here_is_not_given_back(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis, wait_s=2) as store:
            await store.records.open(own("kept"))
            redis.pause()
            (first,) = await claimed(store, "r")
            assert code((await asyncio.gather(first, return_exceptions=True))[0]) == "store_unavailable"
            (again,) = await claimed(store, "r")
            redis.resume()
            await again
            await store.records.open(own("another"))  # which is sent after whatever was given back
            async with Redis.from_url(redis.url) as client:
                assert await client.hget(KEYS.request("/r"), "state") == b"running"

    asyncio.run(main())


def test_a_bug_costs_the_claims_of_its_command_only(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store:
            commands = Commands(store)
            commands.bug = ArithmeticError("a bug")
            claiming = await claimed(store, "a", "b")
            await until(lambda: commands.sizes == [2])
            late = await claimed(store, "late")
            told = await asyncio.gather(*claiming, *late, return_exceptions=True)
            assert [type(answer) for answer in told] == [ArithmeticError, ArithmeticError, Recording]
            await store.records.open(own("a"))
            assert commands.sizes == [2, 1, 1]

    asyncio.run(main())


def test_nothing_is_claimed_after_the_end(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis, wait_s=0.5) as store:
            before = asyncio.all_tasks()
            redis.kill()
            (claiming,) = await claimed(store, "r")
            await until(lambda: not store.membership.up.is_set())
        assert asyncio.all_tasks() <= before | {claiming}
        with pytest.raises(UserError) as caught:
            await claiming
        assert caught.value.code == "store_unavailable"

    asyncio.run(main())


def test_an_id_is_its_caller_s_own(redis: RedisServer) -> None:
    """Neither may take another's, nor learn that it is there, wherever names and ids are cut."""

    async def main() -> None:
        async with proxy(redis) as store:
            calls = [replace(own(request), caller=caller) for caller, request in (("a", "r"), ("b", "r"), ("a/r", "r"))]
            calls += [replace(own("r/r"), caller="a"), own("r"), own("a/r")]
            assert len({call.key for call in calls}) == len(calls)
            opened = await asyncio.gather(*(store.records.open(call) for call in calls))
            assert all(each.seed == 7 for each in opened)
            with pytest.raises(UserError) as caught:
                await store.records.open(calls[0])
            assert caught.value.status == 409 and "a/r" not in caught.value.message

    asyncio.run(main())
