"""Retries get the answer that was begun."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from aegis.core.rng import Stream as Draws
from tests.checkpoints import VOCAB_SIZE
from tests.live import zoo
from tests.live.server import SPLIT, Server, eventually, launched
from tests.live.streams import Body, client_of, run_all
from tests.redis_server import external_kind, redis_server

pytestmark = pytest.mark.usefixtures("zoo_server")  # `market` may be it

STREAMS = 16
TOKENS = 120


@pytest.fixture(scope="module", params=[pytest.param("valkey", marks=pytest.mark.long), "redis-server"])
def market(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path, zoo_dir: Path
) -> Iterator[Server]:
    if request.param == external_kind():
        yield request.getfixturevalue("zoo_server")
        return
    directory = tmp_path_factory.mktemp("market")
    options = ["--models", str(zoo_dir), "--dtype", "float32", *zoo.MEMORY, *SPLIT]
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(request.param, directory))
        running = stack.enter_context(launched(directory, cache, *options, "--redis", redis.url))
        running.wait_for_ready()
        yield running


def _bodies(name: str) -> list[Body]:
    """Half of them sample, without a seed of the client's."""
    bodies: list[Body] = []
    for n in range(STREAMS):
        draws = Draws(0, "store", n)
        prompt = [draws.below(VOCAB_SIZE) for _ in range(1 + draws.below(60))]
        body = {"model": zoo.SERVED[n % len(zoo.SERVED)], "prompt": prompt, "max_tokens": TOKENS, "temperature": n % 2}
        bodies.append(body | {"ignore_eos": True, "logprobs": 1, "request_id": f"{name}-{n}"})
    return bodies


def _ask(server: Server, body: Body) -> httpx.Response:
    return server.post("/v1/completions", body)


def test_a_retry_is_answered_as_the_request_was(market: Server) -> None:
    bodies = _bodies("finished")
    first = run_all(market.url, bodies)
    assert [len(stream.tokens) for stream in first] == [TOKENS] * STREAMS
    before = market.metrics().total("store_replayed_total")
    again = run_all(market.url, bodies)
    assert [(s.tokens, s.text, s.finish) for s in again] == [(s.tokens, s.text, s.finish) for s in first]
    assert market.metrics().total("store_replayed_total") == before + STREAMS
    whole = _ask(market, bodies[1] | {"return_token_ids": True}).json()
    assert whole["id"] == "cmpl-finished-1"
    assert whole["choices"][0]["token_ids"] == first[1].tokens


def test_another_request_under_the_same_id_is_refused(market: Server) -> None:
    body = {"model": zoo.SERVED[0], "prompt": [5, 6], "max_tokens": 2, "request_id": "mine"}
    assert _ask(market, body).status_code == 200
    reply = _ask(market, body | {"prompt": [5, 7]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "request_id_reused")


@pytest.mark.long
def test_clients_that_left_get_whole_answers_at_their_retries(market: Server) -> None:
    calm = run_all(market.url, [body | {"seed": 1} for body in _bodies("stays")])
    bodies = [body | {"seed": 1} for body in _bodies("leaves")]
    before = market.metrics().total("store_taken_over_total")

    async def leave(client: httpx.AsyncClient, body: Body) -> None:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            await anext(aiter(reply.aiter_lines()))

    async def all_leave() -> None:
        async with client_of(market.url) as client, asyncio.TaskGroup() as group:
            for body in bodies:
                group.create_task(leave(client, body))

    asyncio.run(all_leave())
    for body, stream in zip(bodies, calm, strict=True):
        again = eventually(lambda body=body: _answered(market, body), "the retry is answered")
        assert again["choices"][0]["token_ids"] == stream.tokens
    assert market.metrics().total("store_taken_over_total") > before


def _answered(server: Server, body: Body) -> Any:
    """Nothing while the server has not noticed that the first client is gone."""
    reply = _ask(server, body | {"return_token_ids": True})
    assert reply.status_code == 200 or reply.json()["error"]["code"] == "request_in_flight"
    return reply.json() if reply.status_code == 200 else None
