"""One proxy's part of the metadata store: its leases, its calls, the loads of instances."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from aegis.config import RedisSettings
from aegis.core.ids import InstanceId
from aegis.runtime.store.connection import FAILURES, connect, shown
from aegis.runtime.store.keys import Keys
from aegis.runtime.store.loads import Load, Loads
from aegis.runtime.store.membership import Identity, Membership
from aegis.runtime.store.metrics import StoreMetrics
from aegis.runtime.store.recorder import Recorder
from aegis.runtime.store.server import EmbeddedServer

_logger = logging.getLogger(__name__)

_PUBLISH_S = 0.5
_COMMAND_S = 1.0  # what a command may take; a claim tries again within its own limit


class Store:
    """What `open_store` opens. `records` is what the HTTP layer asks."""

    def __init__(self, redis: Redis, settings: RedisSettings, identity: Identity, *, place: str) -> None:
        """`place` is how messages call the server."""
        keys = Keys(settings.prefix)
        self.membership = Membership(redis, keys, identity, place=place)
        self.records = Recorder(
            redis, keys, self.membership, identity.owner, ttl_s=settings.ttl_s, wait_s=settings.wait_s
        )
        self.loads = Loads(redis, keys)
        self.embedded: EmbeddedServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises UserError where the server cannot be used, or not beside another cluster."""
        await self.membership.enter()
        self._run(self.membership.renew_for_ever())
        self._run(self.records.write_for_ever())
        self._run(self.records.keep_for_ever())

    def watch(self, loads: Callable[[], Mapping[InstanceId, Load]], registry: CollectorRegistry) -> None:
        """From now on publishes these loads, twice a second, and tells the registry how the store does."""
        registry.register(StoreMetrics(self.membership, self.records))
        self._run(self._publish_for_ever(loads))

    async def close(self) -> None:
        await self.records.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.membership.leave()

    def _run(self, loop: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(loop)
        task.add_done_callback(_report)
        self._tasks.append(task)

    async def _publish_for_ever(self, loads: Callable[[], Mapping[InstanceId, Load]]) -> None:
        while True:
            await self.membership.up.wait()
            try:
                await self.loads.publish(loads())
            except FAILURES:
                self.membership.doubt()
            await asyncio.sleep(_PUBLISH_S)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _logger.error("a task of the store broke", exc_info=error)


@asynccontextmanager
async def open_store(settings: RedisSettings, identity: Identity | None = None) -> AsyncIterator[Store]:
    """The store of the settings: theirs, or an embedded one that ends with this process. Raises UserError."""
    async with contextlib.AsyncExitStack() as stack:
        server: EmbeddedServer | None = None
        if settings.url is None:
            directory = stack.enter_context(TemporaryDirectory(prefix="aegis-redis-"))
            server = EmbeddedServer(Path(directory))
            stack.push_async_callback(server.close)
            await server.start()
            url = server.url
        else:
            url = settings.url.get_secret_value()
        redis = connect(url, timeout_s=_COMMAND_S)
        stack.push_async_callback(redis.aclose)
        store = Store(redis, settings, identity or Identity.new(), place="embedded" if server else shown(url))
        store.embedded = server
        stack.push_async_callback(store.close)
        await store.start()
        yield store
