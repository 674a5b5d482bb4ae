"""Redis and the broker hear of streams now and then, not with each token, and no token waits for them."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiomqtt
import msgspec
import pytest
import redis

from bench.lab.token_path import Result, run
from tests import brokers
from tests.brokers import Broker
from tests.live.market import MARKET
from tests.live.server import SPLIT, Server, launched
from tests.live.streams import Body, Stream, run_all, until
from tests.redis_server import RedisServer, redis_server

MODEL = next(iter(MARKET))
OPTIONS = ("--dtype", "float32", "--device-memory", "64MiB", *SPLIT)
STREAMS, TOKENS = 16, 300
OF_A_REQUEST, A_SECOND = 4, 30
"""Messages, at most: a request takes a few when it begins and ends; all that is to be written is written together, ten
times a second."""

AT_THE_EDGES = 20
"""Of a window tokens and system calls are counted by two processes."""


@dataclass(frozen=True, slots=True)
class Market:
    """A server with Debian's Redis and broker."""

    server: Server
    redis: RedisServer
    broker: Broker


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Market]:
    directory = tmp_path_factory.mktemp("token-path")
    with (
        redis_server("redis-server", directory) as store,
        brokers.running("mosquitto", directory / "broker") as broker,
        launched(
            directory,
            cache,
            *("--models", str(checkpoints_dir / MODEL), *OPTIONS),
            *("--redis", store.url, "--mqtt", broker.url),
        ) as server,
    ):
        server.wait_for_ready()
        yield Market(server, store, broker)


def _bodies() -> list[Body]:
    ends = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    return [{"model": MODEL, "prompt": [5 + n, 6]} | ends for n in range(STREAMS)]


def _whole(streams: Sequence[Stream]) -> None:
    assert [(stream.error, len(stream.tokens)) for stream in streams] == [(None, TOKENS)] * STREAMS


def test_what_redis_and_the_broker_hear_grows_with_time_and_not_with_tokens(market: Market) -> None:
    address = market.broker.address
    heard: list[str] = []
    started_s = time.monotonic()

    async def listen(streams: Sequence[Stream]) -> None:
        login: dict[str, Any] = {"username": address.user, "password": address.password}
        async with aiomqtt.Client(address.host, address.port, **login) as client:
            await client.subscribe("#")

            async def count() -> None:
                async for message in client.messages:
                    heard.append(str(message.topic))

            counting = asyncio.create_task(count())
            await until(lambda: all(stream.ended for stream in streams), "all are answered")
            counting.cancel()

    with redis.Redis.from_url(market.redis.url) as store:
        before = store.info("stats")["total_reads_processed"]
        streams = run_all(market.server.url, _bodies(), listen)
        read = store.info("stats")["total_reads_processed"] - before
    _whole(streams)
    most = OF_A_REQUEST * STREAMS + A_SECOND * (time.monotonic() - started_s)
    assert 0 < read < most
    assert 0 < len(heard) < most


def test_tokens_come_while_redis_and_the_broker_stand_still(market: Market) -> None:
    async def stop(streams: Sequence[Stream]) -> None:
        await until(lambda: all(stream.tokens for stream in streams), "all have begun")
        market.redis.pause()
        market.broker.pause()
        try:
            await until(lambda: all(stream.ended for stream in streams), "all are answered meanwhile", within_s=60.0)
        finally:
            market.redis.resume()
            market.broker.resume()

    _whole(run_all(market.server.url, _bodies(), stop))


@pytest.mark.skipif(not shutil.which("strace"), reason="no strace; on Debian: apt-get install strace")
def test_the_trace_finds_who_is_spoken_to(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(cache))
    options = ["--models", str(checkpoints_dir / MODEL), *OPTIONS]
    result = run(tmp_path / "path.json", options=options, streams=(1, 8), window_s=2.0)
    assert msgspec.json.decode((tmp_path / "path.json").read_bytes(), type=Result) == result
    assert result.services == ("Redis", "MQTT")
    for window in result.windows:
        assert window.tokens > 0
        assert window.sends["links"] >= window.instance_sends["links"] > 0, "the launcher may ask how an instance is"
        assert 0 < window.sends["clients"] <= 1.1 * window.tokens + AT_THE_EDGES
        assert window.sends["others"] == window.instance_sends["Redis"] == window.sends["Ray"] == 0
    assert [window.still for window in result.windows] == [False, False, True]
