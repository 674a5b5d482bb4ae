"""An instance that is killed is started again; its requests go on as if nothing had happened. So do those whose KV
finds no room anywhere."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

import pytest

from aegis.core.rng import Stream as Draws
from tests.checkpoints import VOCAB_SIZE
from tests.live import zoo
from tests.live.server import Server, eventually
from tests.live.streams import Body, Stream, client_of, run_all, until

STREAMS = 16
SHORT_REQUESTS = 160
SHORT_AT_ONCE = 24
PREFILL, DECODE = "prefill-0", "decode-0"


def _bodies(count: int, *, max_tokens: int) -> list[Body]:
    """Every other one samples, all of them have seeds."""
    bodies: list[Body] = []
    for n in range(count):
        draws = Draws(0, "kills", max_tokens, n)
        prompt = [draws.below(VOCAB_SIZE) for _ in range(1 + draws.below(100))]
        body = {"model": zoo.SERVED[n % len(zoo.SERVED)], "prompt": prompt, "max_tokens": max_tokens}
        bodies.append(body | {"ignore_eos": True, "seed": n, "temperature": n % 2, "logprobs": 0})
    return bodies


@pytest.fixture(scope="module")
def undisturbed(zoo_server: Server) -> list[list[int]]:
    streams = run_all(zoo_server.url, _bodies(STREAMS, max_tokens=120))
    assert [len(stream.tokens) for stream in streams] == [120] * STREAMS
    return [stream.tokens for stream in streams]


def test_streams_survive_that_there_is_no_room_for_their_kv(zoo_server: Server, undisturbed: list[list[int]]) -> None:
    before = zoo_server.metrics()
    streams = run_all(zoo_server.url, _bodies(3 * STREAMS, max_tokens=120))
    assert [len(stream.tokens) for stream in streams] == [120] * len(streams)
    assert [stream.tokens for stream in streams[:STREAMS]] == undisturbed
    after = zoo_server.wait_for_freed_memory()
    assert after.total("instance_given_up_total") > before.total("instance_given_up_total")


def _kill(server: Server, *instances: str) -> None:
    for pid in [server.pid_of(instance) for instance in instances]:
        os.kill(pid, signal.SIGKILL)


def _some_started(streams: Sequence[Stream]) -> bool:
    return sum(bool(stream.tokens) for stream in streams) >= STREAMS // 4


def _all_in_the_middle(streams: Sequence[Stream]) -> bool:
    return sum(len(stream.tokens) for stream in streams) >= 20 * STREAMS


@pytest.mark.parametrize(
    ("instances", "moment"),
    [((PREFILL,), _some_started), ((DECODE,), _all_in_the_middle), ((PREFILL, DECODE), _all_in_the_middle)],
    ids=["prefill", "decode", "both"],
)
def test_streams_survive_a_kill(
    zoo_server: Server,
    undisturbed: list[list[int]],
    instances: tuple[str, ...],
    moment: Callable[[Sequence[Stream]], bool],
) -> None:
    before = zoo_server.metrics()

    async def strike(streams: Sequence[Stream]) -> None:
        await until(lambda: moment(streams), "the moment to kill")
        assert sum(stream.done for stream in streams) < STREAMS // 2
        _kill(zoo_server, *instances)

    streams = run_all(zoo_server.url, _bodies(STREAMS, max_tokens=120), strike)
    for stream, tokens in zip(streams, undisturbed, strict=True):
        assert stream.error is None
        assert stream.tokens == tokens
        assert stream.done
    _recovers(zoo_server, restarts=before.total("instance_restarts_total") + len(instances))
    after = zoo_server.metrics()
    assert after.total("request_failure_total") == before.total("request_failure_total")
    if DECODE in instances:  # a prefill instance may have handed over all it had
        assert after.total("request_replays_total") > before.total("request_replays_total")


@pytest.mark.parametrize("instance", [PREFILL, DECODE])
def test_a_kill_while_requests_are_handed_over_loses_none(zoo_server: Server, instance: str) -> None:
    before = zoo_server.metrics()
    bodies = _bodies(SHORT_REQUESTS, max_tokens=3)

    async def load(strike: bool) -> list[Stream]:
        streams = [Stream(body) for body in bodies]
        slots = asyncio.Semaphore(SHORT_AT_ONCE)

        async def one(stream: Stream) -> None:
            async with slots:
                await stream.run(client)

        async with client_of(zoo_server.url) as client, asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(one(stream))
            if strike:
                await until(lambda: sum(stream.done for stream in streams) >= SHORT_REQUESTS // 4, "work is flowing")
                _kill(zoo_server, instance)
        return streams

    calm = asyncio.run(load(strike=False))
    struck = asyncio.run(load(strike=True))
    assert [stream.error for stream in struck] == [None] * SHORT_REQUESTS
    assert [stream.tokens for stream in struck] == [stream.tokens for stream in calm]
    _recovers(zoo_server, restarts=before.total("instance_restarts_total") + 1)


def _recovers(server: Server, restarts: int) -> None:
    eventually(server.ready, "/ready answers 200 again")
    metrics = server.wait_for_freed_memory()
    assert metrics.total("instance_restarts_total") == restarts
    assert "Traceback" not in server.output()
