"""One proxy's part of the metadata store: its leases, its calls, the loads of instances."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.asyncio import Redis

from aegis.config.config import RedisSettings
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId
from aegis.metadata.connection import FAILURES, connect, shown
from aegis.metadata.embedded_server import EmbeddedServer
from aegis.metadata.keys import Keys
from aegis.metadata.loads import Load, Loads
from aegis.metadata.membership import Identity, Membership
from aegis.metadata.recorder import Recorder
from aegis.metadata.responses import StoredResponses
from aegis.process.scratch_directory import scratch
from aegis.process.tasks import cancelled
from proxy.http.responses.stored_responses import RESPONSES_TTL_S

_TOLD = {
    "replayed": "Retries answered from the record",
    "taken_over": "Requests that went on from where another proxy, or an earlier connection, left them",
    "written_batches": "Batches of tokens that were written",
    "restored": "Records written again because the server had lost them",
    "dropped": "Ends of requests that could not be written",
    "refused": "Requests answered 503 because the server did not answer in time",
}


class StoreMetrics(Collector):
    """`aegis:store_up`, `aegis:store_unwritten` and, per counter x, `aegis:store_x_total`; of all proxies together."""

    def __init__(self, membership: Membership, records: Recorder) -> None:
        self._membership = membership
        self._records = records

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        up = float(self._membership.up.is_set())
        yield GaugeMetricFamily("aegis:store_up", "Proxies that can use the metadata store", value=up)
        yield GaugeMetricFamily(
            "aegis:store_unwritten", "Requests of which something is not written yet", value=self._records.unwritten
        )
        for name, value in msgspec.structs.asdict(self._records.counters).items():
            yield CounterMetricFamily(f"aegis:store_{name}", f"{_TOLD[name]}, since the start", value=value)


_logger = logging.getLogger(__name__)

_PUBLISH_S = 0.5
_COMMAND_S = 1.0  # the limit of a command; a claim tries again within its own limit


class StoreSettings(Struct, frozen=True):
    """The settings that a further proxy needs to join. The URL may hold a password, so it belongs on a pipe, not on a
    command line."""

    url: str
    prefix: str
    cluster: str
    wait_s: float
    ttl_s: float
    responses_ttl_s: float = RESPONSES_TTL_S


class Store:
    """The store that `open_store` and `join_store` open. The HTTP layer asks `records` and `responses`."""

    def __init__(self, redis: Redis, settings: StoreSettings, identity: Identity, *, place: str) -> None:
        """`place` is how messages call the server."""
        self.settings = settings
        keys = Keys(settings.prefix)
        self.membership = Membership(redis, keys, identity, place=place)
        self.records = Recorder(
            redis, keys, self.membership, identity.owner, ttl_s=settings.ttl_s, wait_s=settings.wait_s
        )
        self.loads = Loads(redis, keys)
        self.responses = StoredResponses(redis, keys, self.membership, ttl_s=settings.responses_ttl_s)
        self.embedded: EmbeddedServer | None = None
        self._is_first = identity.is_first
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises UserError if the server cannot be used, or not beside another cluster. A further proxy of one that
        runs comes up without it, and asks on."""
        try:
            await self.membership.enter()
        except UserError:
            if self._is_first:
                raise
        self._run(self.membership.renew_for_ever())
        self._run(self.records.write_for_ever())
        self._run(self.records.keep_for_ever())
        self._run(self.responses.write_for_ever())

    def report_to(self, registry: CollectorRegistry) -> None:
        """The state of the store is among the metrics from now on."""
        registry.register(StoreMetrics(self.membership, self.records))

    def publish(self, loads: Callable[[], Mapping[InstanceId, Load]]) -> None:
        """From now on these loads are published, twice a second; for the one process that knows them."""
        self._run(self._publish_for_ever(loads))

    def declare_dead(self, proxy: str, number: int) -> None:
        """This further proxy's process has ended."""
        self._run(self.membership.declare_dead(proxy, number))

    async def close(self) -> None:
        await self.records.close()
        await self.responses.close()
        await cancelled(*self._tasks)
        await self.membership.leave()

    def _run(self, loop: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(loop)
        task.add_done_callback(_report)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _publish_for_ever(self, loads: Callable[[], Mapping[InstanceId, Load]]) -> None:
        while True:
            await self.membership.up.wait()
            try:
                await self.loads.publish(loads())
            except FAILURES:
                self.membership.report_failure()
            await asyncio.sleep(_PUBLISH_S)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _logger.error("a task of the store broke", exc_info=error)


@asynccontextmanager
async def open_store(config: RedisSettings) -> AsyncIterator[Store]:
    """The store of a new cluster: at the server that was named, or at an embedded one that ends with this process.
    Raises UserError."""
    async with contextlib.AsyncExitStack() as stack:
        server: EmbeddedServer | None = None
        if config.url is None:
            server = EmbeddedServer(stack.enter_context(scratch("aegis-redis-")))
            stack.push_async_callback(server.close)
            await server.start()
        url = server.url if server else config.url.get_secret_value() if config.url else ""
        identity = Identity.first()
        settings = StoreSettings(
            url, config.prefix, identity.cluster, config.wait_s, config.ttl_s, config.responses_ttl_s
        )
        store = await stack.enter_async_context(_entered(settings, identity, "embedded" if server else None))
        store.embedded = server
        yield store


@asynccontextmanager
async def join_store(settings: StoreSettings, proxy: str, number: int) -> AsyncIterator[Store]:
    """The store of a cluster that exists, for a further proxy of it; `number` is its process's alone."""
    async with _entered(settings, Identity.joining(settings.cluster, proxy, number)) as store:
        yield store


@asynccontextmanager
async def _entered(settings: StoreSettings, identity: Identity, place: str | None = None) -> AsyncIterator[Store]:
    redis = connect(settings.url, timeout_s=_COMMAND_S)
    try:
        store = Store(redis, settings, identity, place=place or shown(settings.url))
        try:
            await store.start()
            yield store
        finally:
            await store.close()
    finally:
        await redis.aclose()
