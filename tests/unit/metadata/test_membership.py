"""One cluster uses a prefix at a time, in one schema, and a proxy is alive while it renews its lease."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from aegis.core.errors import UserError
from aegis.metadata.keys import SCHEMA, Keys
from aegis.metadata.membership import LEASE_MS, Identity
from aegis.metadata.store import join_store, open_store
from tests.redis_server import RedisServer
from tests.unit.metadata.proxies import proxy, settings, until

KEYS = Keys("aegis")


def start(server: RedisServer, **changes: Any) -> None:
    async def main() -> None:
        async with open_store(settings(server, **changes)):
            pass

    asyncio.run(main())


def test_leases_are_held_and_given_back(redis: RedisServer) -> None:
    async def main() -> None:
        async with Redis.from_url(redis.url) as client:
            async with open_store(settings(redis)):
                (key,) = [key async for key in client.scan_iter(KEYS.proxies + "*")]
                for lease in (KEYS.cluster, key):
                    assert 0 < await client.pttl(lease) <= LEASE_MS
                assert await client.get(KEYS.schema) == str(SCHEMA).encode()
            assert await client.keys("*") == [KEYS.schema.encode()]

    asyncio.run(main())


def test_a_second_cluster_needs_a_prefix_of_its_own(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis), proxy(redis):
            with pytest.raises(UserError, match="another aegis is using the prefix 'aegis'; set another"):
                async with open_store(settings(redis)):
                    pass
            async with open_store(settings(redis, prefix="other")) as other:
                assert other.membership.up.is_set()

    asyncio.run(main())


def test_a_further_proxy_joins_and_leaves_its_cluster(redis: RedisServer) -> None:
    async def main() -> None:
        async with open_store(settings(redis)) as first, Redis.from_url(redis.url) as client:
            async with join_store(first.settings, "proxy-1", 1):
                assert len(await client.keys(KEYS.proxies + "*")) == 2
            assert len(await client.keys(KEYS.proxies + "*")) == 1
            assert await client.get(KEYS.cluster) == first.settings.cluster.encode()

    asyncio.run(main())


def test_a_further_proxy_comes_up_while_the_server_is_away(redis: RedisServer) -> None:
    async def main() -> None:
        async with open_store(settings(redis)) as first:
            redis.kill()
            async with join_store(first.settings, "proxy-1", 1) as second:
                assert not second.membership.up.is_set()
                redis.start()
                await asyncio.wait_for(second.membership.up.wait(), 20)

    asyncio.run(main())


def test_the_lease_of_a_process_that_ended_is_ended(redis: RedisServer) -> None:
    async def main() -> None:
        async with open_store(settings(redis)) as first, Redis.from_url(redis.url) as client:
            tasks = len(first._tasks)
            killed, lives = (Identity.joining(first.settings.cluster, "proxy-1", number).owner for number in (1, 2))
            for owner in (killed, lives):
                await client.set(KEYS.proxy(owner), "proxy-1", px=60_000)
            first.declare_dead("proxy-1", 1)
            while await client.exists(KEYS.proxy(killed)):
                await asyncio.sleep(0)
            assert await client.exists(KEYS.proxy(lives))
            await until(lambda: len(first._tasks) == tasks)

    asyncio.run(main())


def test_the_lease_of_a_cluster_that_was_killed_runs_out(redis: RedisServer) -> None:
    async def main() -> None:
        async with Redis.from_url(redis.url) as client:
            await client.set(KEYS.cluster, "killed", px=400)
        async with open_store(settings(redis)) as store:
            assert store.membership.up.is_set()

    asyncio.run(main())


def test_a_foreign_schema_is_refused(redis: RedisServer) -> None:
    async def main() -> None:
        async with Redis.from_url(redis.url) as client:
            await client.set(KEYS.schema, SCHEMA + 1)

    asyncio.run(main())
    with pytest.raises(UserError, match=f"have schema {SCHEMA + 1}, this aegis has {SCHEMA}; set another"):
        start(redis)
    start(redis, prefix="other")


def test_a_prefix_that_another_cluster_took_meanwhile_is_left_to_it(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store, Redis.from_url(redis.url) as client:
            await client.set(KEYS.cluster, "other")
            store.membership.report_failure()
            await asyncio.sleep(0)
            await until(lambda: bool(store.membership.reason))
            assert not store.membership.up.is_set()
            assert await client.get(KEYS.cluster) == b"other"
            await client.delete(KEYS.cluster)
            await until(store.membership.up.is_set)

    asyncio.run(main())


def test_incarnations_differ() -> None:
    assert Identity.joining("c", "p", 1).owner != Identity.joining("c", "p", 2).owner
    assert Identity.first().cluster != Identity.first().cluster
