"""Responses that one proxy keeps are found at every other one, for as long as they are kept."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from aegis.core.errors import UserError
from aegis.metadata import responses
from aegis.metadata.keys import Keys
from tests.redis_server import RedisServer
from tests.unit.metadata.proxies import proxy, until

RESPONSES = 40


def test_what_one_proxy_keeps_another_one_finds_and_removes(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as here, proxy(redis) as there, Redis.from_url(redis.url) as client:
            await here.responses.keep("alice/r", b"one")
            assert await there.responses.find("alice/r") == b"one"
            assert await there.responses.find("bob/r") is None
            assert 3500 < await client.ttl(Keys("aegis").response("alice/r")) <= 3600
            assert await there.responses.remove("alice/r")
            assert not await here.responses.remove("alice/r")
            assert await here.responses.find("alice/r") is None

    asyncio.run(main())


def test_where_the_server_is_away_that_is_said(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as here:
            redis.kill()
            for asking in (here.responses.keep("r", b""), here.responses.find("r"), here.responses.remove("r")):
                with pytest.raises(UserError) as told:
                    await asking
                assert told.value.status == 503 and "cannot be reached" in told.value.message

    asyncio.run(main())


def test_what_is_kept_soon_is_found_everywhere_at_once_and_written_together(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as here, proxy(redis) as there, Redis.from_url(redis.url) as client:
            for number in range(RESPONSES):
                await here.responses.keep_soon(f"alice/{number}", b"%d" % number)
            assert not [key async for key in client.scan_iter("aegis:response:*")]
            assert await here.responses.find("alice/3") == b"3"
            assert await there.responses.find("alice/4") == b"4"
            assert 3500 < await client.ttl(Keys("aegis").response("alice/5")) <= 3600
            assert len([key async for key in client.scan_iter("aegis:response:*")]) == RESPONSES
            kept_s = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
            assert kept_s < RESPONSES

    asyncio.run(main())


def test_what_is_removed_or_kept_anew_is_not_written_afterwards(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as here, proxy(redis) as there:
            for key in ("removed", "renewed", "twice"):
                await here.responses.keep_soon(key, b"old")
            assert await here.responses.remove("removed")
            await here.responses.keep("renewed", b"new")
            await here.responses.keep_soon("twice", b"new")
            await here.responses.write()
            assert await there.responses.find("removed") is None
            assert await there.responses.find("renewed") == b"new"
            assert await there.responses.find("twice") == b"new"

    asyncio.run(main())


def test_what_is_left_is_written_at_the_end(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as here:
            await here.responses.keep_soon("alice/r", b"one")
        async with proxy(redis) as there:
            assert await there.responses.find("alice/r") == b"one"

    asyncio.run(main())


def test_what_cannot_be_written_is_when_the_server_is_back(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as here:
            await here.responses.keep_soon("alice/before", b"one")
            redis.kill()
            await here.responses.write()
            await until(lambda: not here.membership.up.is_set())
            await here.responses.keep_soon("alice/meanwhile", b"two")
            assert await here.responses.find("alice/before") == b"one"
            with pytest.raises(UserError):
                await here.responses.keep_soon("alice/long", bytes(1 << 20))
            redis.start()
            await until(here.membership.up.is_set)
            async with proxy(redis) as there:
                assert await there.responses.find("alice/before") == b"one"
                assert await there.responses.find("alice/meanwhile") == b"two"

    asyncio.run(main())


def test_what_is_never_written_is_told(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with proxy(redis) as here:
            await here.responses.keep_soon("alice/r", b"one")
            redis.kill()
        assert "responses are not kept" in caplog.text

    asyncio.run(main())


def test_what_the_server_refuses_is_told_and_not_tried_again(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with proxy(redis) as here, Redis.from_url(redis.url) as client:
            await client.config_set("maxmemory", 1)
            await here.responses.keep_soon("alice/r", b"one")
            await here.responses.write()
            assert "responses are not kept" in caplog.text
            await client.config_set("maxmemory", 0)
            await until(here.membership.up.is_set)
            assert await here.responses.find("alice/r") is None

    asyncio.run(main())


def test_a_server_that_does_not_answer_delays_all_together_and_not_one_after_the_other(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as here:
            began_s = asyncio.get_running_loop().time()
            redis.pause()
            keeping = [here.responses.keep(f"alice/{number}", b"one") for number in range(8)]
            removing = [here.responses.remove(f"alice/{number}") for number in range(8)]
            told = await asyncio.gather(*keeping, *removing, return_exceptions=True)
            redis.resume()
            assert all(isinstance(each, UserError) for each in told)
            assert asyncio.get_running_loop().time() - began_s < 8

    asyncio.run(main())


@pytest.mark.parametrize("nbytes", [(256 << 10) + 1, 256 << 10])
def test_what_is_long_or_much_is_written_at_once(
    redis: RedisServer, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_ROUND_S", 3600)

    async def main() -> None:
        async with proxy(redis) as here, Redis.from_url(redis.url) as client:
            kept = 0
            while not await client.exists(Keys("aegis").response(f"alice/{kept}")):
                kept += 1
                await here.responses.keep_soon(f"alice/{kept}", bytes(nbytes))
            assert kept * nbytes < 9 << 20

    asyncio.run(main())
