"""The loads of instances are those of the living, whoever published them."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from aegis.core.ids import InstanceId, ModelId
from aegis.metadata import loads
from aegis.metadata.keys import Keys
from aegis.metadata.loads import Load
from tests.redis_server import RedisServer
from tests.unit.metadata.proxies import proxy

LOAD = Load("decode", 3, 2, ModelId("a"), (ModelId("a"), ModelId("b")), (ModelId("c"),))
NAME = InstanceId("decode-0")


def test_a_load_is_read_by_another_proxy(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as first, proxy(redis) as second:
            first.publish(lambda: {NAME: LOAD})
            async with asyncio.timeout(20):
                while not (read := await second.loads.read()):
                    await asyncio.sleep(0.005)
            assert read == {NAME: LOAD}

    asyncio.run(main())


def test_an_old_load_is_nobodys(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store, Redis.from_url(redis.url) as client:
            await store.loads.publish({NAME: LOAD, InstanceId("gone"): LOAD})
            key = Keys("aegis").loads
            stamp, _, load = (await client.hget(key, "gone")).partition(b" ")
            await client.hset(key, "gone", str(int(stamp) - loads.LEASE_MS - 1).encode() + b" " + load)
            assert await store.loads.read() == {NAME: LOAD}
            assert await client.hkeys(key) == [NAME.encode()]

    asyncio.run(main())


def test_no_instance_is_no_load(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store:
            await store.loads.publish({})
            assert await store.loads.read() == {}

    asyncio.run(main())
