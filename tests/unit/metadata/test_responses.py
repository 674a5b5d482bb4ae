"""Responses that one proxy keeps are found at every other one, for as long as they are kept."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from aegis.core.errors import UserError
from aegis.metadata.keys import Keys
from tests.redis_server import RedisServer
from tests.unit.metadata.proxies import proxy


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
