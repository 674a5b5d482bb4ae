"""A retry at the HTTP layer: the same reply, whatever the form; another request under the same id is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from aegis.config.config import RedisSettings
from aegis.metadata.store import open_store
from proxy.http.app import create_app
from proxy.http.fields import Fields
from tests.redis_server import RedisServer, redis_server
from tests.unit.metadata.proxies import until
from tests.unit.proxy.http import scripted
from tests.unit.proxy.http.scripted import TEXTS, ScriptedMarket, market, says

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 20, "request_id": "mine"}


def calling(behind: ScriptedMarket, calls: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_store(RedisSettings()) as store:
            transport = httpx.ASGITransport(app=create_app(behind, records=store.records, texts=TEXTS))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await calls(client)

    asyncio.run(main())


def told(reply: httpx.Response) -> dict[str, Any]:
    """All but the time."""
    return {name: value for name, value in reply.json().items() if name != "created"}


@pytest.mark.parametrize(
    "asks",
    [
        {},
        {"n": 3},
        {"prompt": ["hi", "ho"], "n": 2},
        {"logprobs": 1},
        {"logprobs": 1, "echo": True},
        {"stop": "l"},
        {"stop": "zz", "max_tokens": 5},
    ],
)
def test_a_retry_gets_the_same_reply_and_generates_nothing(asks: dict[str, Any]) -> None:
    behind = market(says("hello world"))

    async def calls(client: httpx.AsyncClient) -> None:
        first = await client.post(COMPLETIONS, json=BODY | asks)
        assert first.status_code == 200
        submitted = len(behind.submitted)
        again = await client.post(COMPLETIONS, json=BODY | asks)
        assert told(again) == told(first)
        assert len(behind.submitted) == submitted

    calling(behind, calls)


def test_a_retry_may_be_streamed_and_have_its_id_in_the_header() -> None:
    async def calls(client: httpx.AsyncClient) -> None:
        first = await client.post(COMPLETIONS, json=BODY)
        body = {name: value for name, value in BODY.items() if name != "request_id"} | {"stream": True}
        again = await client.post(COMPLETIONS, json=body, headers={"X-Request-Id": "mine"})
        events = [line.removeprefix("data: ") for line in again.text.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        assert text == first.json()["choices"][0]["text"]

    calling(market(says("hello world")), calls)


def test_chats_are_recorded_too() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "request_id": "mine", "max_tokens": 20}

    async def calls(client: httpx.AsyncClient) -> None:
        first = await client.post(CHAT, json=body)
        assert told(await client.post(CHAT, json=body)) == told(first)
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 422

    calling(market(says("hello world")), calls)


def test_another_request_under_the_same_id_is_refused() -> None:
    async def calls(client: httpx.AsyncClient) -> None:
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 200
        error = await client.post(COMPLETIONS, json=BODY | {"prompt": "ho"})
        assert (error.status_code, error.json()["error"]["param"]) == (422, "request_id")
        assert (await client.post(COMPLETIONS, json=BODY | {"prompt": "ho", "request_id": "other"})).status_code == 200

    calling(market(says("hello world")), calls)


def test_what_was_refused_after_it_was_claimed_can_be_retried() -> None:
    behind = market(says("hello world"))

    async def calls(client: httpx.AsyncClient) -> None:
        from aegis.core.errors import UserError

        behind.refusals.append(UserError("not now", status=503))
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 503
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 200

    calling(behind, calls)


def test_an_answer_is_recorded_though_its_id_was_made_here() -> None:
    behind = market(says("hello world"))
    body = {name: value for name, value in BODY.items() if name != "request_id"}

    async def calls(client: httpx.AsyncClient) -> None:
        first = await client.post(COMPLETIONS, json=body)
        retried = {"X-Request-Id": first.headers["X-Request-Id"]}
        assert told(await client.post(COMPLETIONS, json=body, headers=retried)) == told(first)
        assert len(behind.submitted) == 1

    calling(behind, calls)


def test_a_request_with_an_id_waits_for_the_record_and_no_other_one(tmp_path: Path) -> None:
    behind = market(says("hello world"))
    body = {name: value for name, value in BODY.items() if name != "request_id"}

    async def main(server: RedisServer) -> None:
        async with open_store(RedisSettings(url=SecretStr(server.url), wait_s=0.3)) as store:
            transport = httpx.ASGITransport(app=create_app(behind, records=store.records, texts=TEXTS))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                server.pause()
                for stream in (False, True):
                    reply = await client.post(COMPLETIONS, json=BODY | {"stream": stream})
                    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")
                assert not behind.submitted
                first = await client.post(COMPLETIONS, json=body)
                assert first.status_code == 200
                server.resume()
                await until(lambda: not store.records.unwritten)
                retried = {"X-Request-Id": first.headers["X-Request-Id"]}
                assert told(await client.post(COMPLETIONS, json=body, headers=retried)) == told(first)
                assert len(behind.submitted) == 1

    with redis_server("valkey", tmp_path) as server:
        asyncio.run(main(server))


def test_a_retry_of_which_nothing_is_recorded_has_the_same_seed() -> None:
    behind = market(says("hello"))
    body = {name: value for name, value in BODY.items() if name != "request_id"}

    async def calls(client: httpx.AsyncClient) -> None:
        first = await client.post(COMPLETIONS, json=body)
        again = {"X-Request-Id": first.headers["X-Request-Id"]}
        await client.post(COMPLETIONS, json=body, headers=again)
        await client.post(COMPLETIONS, json=body)

    scripted.calling(behind, calls)
    first, retried, other = (sampling.seed for _, _, sampling in behind.submitted)
    assert first == retried != other


def test_a_fingerprint_knows_neither_order_nor_what_does_not_count() -> None:
    first = Fields({"a": 1, "b": {"c": [1, 2], "d": None}, "stream": True})
    second = Fields({"stream": False, "b": {"d": None, "c": [1, 2]}, "a": 1})
    assert first.fingerprint({"stream"}) == second.fingerprint({"stream"})
    assert first.fingerprint(()) != second.fingerprint(())
    assert first.fingerprint({"stream"}) != Fields({"a": 2, "b": {"c": [1, 2], "d": None}}).fingerprint(())
