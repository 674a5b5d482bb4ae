"""Redis and the broker hear of streams now and then, not with each token, and no token waits for them."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiomqtt
import msgspec
import pytest
import redis

from bench.lab.token_path import Result, run
from tests.live.market import MARKET
from tests.live.roomy import Services
from tests.live.server import SPLIT, Server
from tests.live.streams import Body, Stream, run_all, until

MODEL = next(iter(MARKET))
OPTIONS = ("--dtype", "float32", "--device-memory", "64MiB", *SPLIT)
STREAMS, TOKENS = 16, 300
OF_A_REQUEST, A_SECOND = 4, 30
"""Messages, at most: a request takes a few when it begins and ends; all that is to be written is written together, ten
times a second."""

AT_THE_EDGES = 20
"""Of a window tokens and system calls are counted by two processes."""


def _bodies() -> list[Body]:
    ends = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    return [{"model": MODEL, "prompt": [5 + n, 6]} | ends for n in range(STREAMS)]


def _whole(streams: Sequence[Stream]) -> None:
    assert [(stream.error, len(stream.tokens)) for stream in streams] == [(None, TOKENS)] * STREAMS


def test_what_redis_and_the_broker_hear_grows_with_time_and_not_with_tokens(roomy: Server, services: Services) -> None:
    address = services.broker.address
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

    with redis.Redis.from_url(services.redis.url) as store:
        before = store.info("stats")["total_reads_processed"]
        streams = run_all(roomy.url, _bodies(), listen)
        read = store.info("stats")["total_reads_processed"] - before
    _whole(streams)
    most = OF_A_REQUEST * STREAMS + A_SECOND * (time.monotonic() - started_s)
    assert 0 < read < most
    assert 0 < len(heard) < most


def test_tokens_come_while_redis_and_the_broker_stand_still(roomy: Server, services: Services) -> None:
    async def stop(streams: Sequence[Stream]) -> None:
        await until(lambda: all(stream.tokens for stream in streams), "all have begun")
        services.redis.pause()
        services.broker.pause()
        try:
            await until(lambda: all(stream.ended for stream in streams), "all are answered meanwhile", within_s=60.0)
        finally:
            services.redis.resume()
            services.broker.resume()

    _whole(run_all(roomy.url, _bodies(), stop))


@pytest.mark.long
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
