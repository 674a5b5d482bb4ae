"""Proxies for tests: the store of each, as it runs in a proxy, several of them in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from pydantic import SecretStr
from redis.asyncio import Redis

from aegis.config.config import RedisSettings
from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.core.request import FinishReason, Sampling, Token
from aegis.metadata.keys import Keys
from aegis.metadata.recording import Recording
from aegis.metadata.store import Store, StoreSettings, join_store
from proxy.http.call_records import RecordedCall
from proxy.http.market import Delivery, Delta, Finished, PromptScores, SequenceHandle
from tests.redis_server import RedisServer

CLUSTER = "cluster"
KEYS = Keys("aegis")
_numbers = count()
SAMPLING = Sampling(max_tokens=100, seed=7)


def settings(server: RedisServer, **changes: Any) -> RedisSettings:
    return RedisSettings(url=SecretStr(server.url), **{"wait_s": 5.0} | changes)


@asynccontextmanager
async def proxy(server: RedisServer, *, wait_s: float = 5, ttl_s: float = 600) -> AsyncIterator[Store]:
    """Of a cluster that all of them belong to."""
    async with join_store(StoreSettings(server.url, "aegis", CLUSTER, wait_s, ttl_s), "proxy", next(_numbers)) as store:
        yield store


async def die(server: RedisServer, store: Store) -> None:
    """What the server sees of a proxy that was killed some seconds ago."""
    for task in store._tasks:
        task.cancel()
    async with Redis.from_url(server.url) as client:
        await client.delete(*[key async for key in client.scan_iter(KEYS.proxies + "*")])


def asked(
    request: str = "r",
    *,
    fingerprint: str = "f",
    seed: int = 7,
    sequences: int = 1,
    is_new: bool = False,
) -> RecordedCall:
    sampling = Sampling(max_tokens=100, seed=seed)
    return RecordedCall(request, fingerprint, ModelId("m"), Slo(1, 1), sampling, sequences, is_new)


def tokens(*ids: int) -> tuple[Token, ...]:
    return tuple(Token(i, -i / 8, ((i, -i / 8),)) for i in ids)


class Scripted:
    """A sequence handle that delivers what it was given, and then waits to be cancelled."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self._deliveries = deliveries
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        for delivery in self._deliveries:
            yield delivery

    def cancel(self, *, satisfied: bool = False) -> None:
        self.cancelled = True


class Answer:
    """What a client got of one sequence, and what was asked of the scheduler for it."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.scores: tuple[Token, ...] = ()
        self.finish: FinishReason | None = None
        self.sent: tuple[int, ...] | None = None
        self.sampling: Sampling | None = None
        self.handle: SequenceHandle | None = None

    async def read(self, recording: Recording, *generated: Delivery, sequence: int = 0) -> Answer:
        """Everything that is recorded, and then generated."""

        def submit(sampling: Sampling, sent: tuple[int, ...]) -> SequenceHandle:
            self.sent, self.sampling = sent, sampling
            return Scripted(generated)

        self.handle = recording.handle(sequence, SAMPLING, submit)
        async for delivery in self.handle:
            match delivery:
                case Delta(new):
                    self.tokens += new
                case PromptScores(scores):
                    self.scores = scores
                case Finished(reason):
                    self.finish = reason
        return self


async def read(recording: Recording, *generated: Delivery, sequence: int = 0) -> Answer:
    return await Answer().read(recording, *generated, sequence=sequence)


async def written(store: Store) -> None:
    await until(lambda: store.records.unwritten == 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)
