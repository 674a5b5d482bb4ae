"""Readers outside find the load of each instance in one hash, with the server's time of when it was published."""

from __future__ import annotations

import asyncio

import msgspec
from redis.asyncio import Redis

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.ids import InstanceId, ModelId
from aegis.metadata.keys import Keys
from aegis.metadata.loads import LEASE_MS, Load
from tests.redis_server import RedisServer
from tests.unit.metadata.proxies import proxy

LOAD = Load("decode", 3, 2, ModelId("a"), (ModelId("a"), ModelId("b")), (ModelId("c"),))
NAME = InstanceId("decode-0")
KEY = Keys("aegis").loads


def test_what_is_published_can_be_read_and_is_published_again(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store, Redis.from_url(redis.url) as client:
            store.publish(lambda: {NAME: LOAD})
            stamps: set[bytes] = set()
            async with asyncio.timeout(20):
                while len(stamps) < 2:
                    for name, written in (await client.hgetall(KEY)).items():
                        stamp, _, load = written.partition(b" ")
                        assert name == NAME.encode() and msgspec.json.decode(load, type=Load) == LOAD
                        stamps.add(stamp)
                    await asyncio.sleep(0.005)

    asyncio.run(main())


def test_a_load_bears_the_servers_time_and_does_not_outlive_the_lease(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store, Redis.from_url(redis.url) as client:
            await store.loads.publish({NAME: LOAD})
            seconds, microseconds = await client.time()
            now_ms = (seconds * NS_PER_S + microseconds * 1_000) // NS_PER_MS
            stamp = int((await client.hget(KEY, NAME)).partition(b" ")[0])
            assert now_ms - LEASE_MS < stamp <= now_ms
            assert 0 < await client.pttl(KEY) <= LEASE_MS

    asyncio.run(main())


def test_no_instance_is_no_load(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store, Redis.from_url(redis.url) as client:
            await store.loads.publish({})
            assert await client.hgetall(KEY) == {}

    asyncio.run(main())
