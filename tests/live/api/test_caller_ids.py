"""An id is its caller's own: nobody takes another's, waits for it, or learns that it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx

from tests.live.api.keys import UNLIMITED
from tests.live.server import Server
from tests.live.streams import WAIT_S, Stream, until

ID = "the-same/id"
TOKENS = 60
LONG = 30_000
"""So many that they are on their way however long this process gets no processor."""
ASKS = 12
"""Each on a connection of its own, so that every proxy is asked."""


def client_of(server: Server, caller: str, request: str = ID) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {UNLIMITED[caller]}"} | ({"x-request-id": request} if request else {})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=WAIT_S, limits=limits, trust_env=False, verify=False
    )


def body_of(caller: str, max_tokens: int = TOKENS) -> dict[str, Any]:
    prompt = [5, 6, 7 + list(UNLIMITED).index(caller)]
    return {"model": "long", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def settled(server: Server, caller: str) -> None:
    """Returns when the end of `caller`'s request is stored, which its client may hear of a moment before."""
    async with client_of(server, caller) as client:
        while (await client.post("/v1/completions", json=body_of(caller))).status_code == httpx.codes.CONFLICT:
            await asyncio.sleep(0.01)


async def replies(server: Server, caller: str, body: dict[str, Any]) -> list[httpx.Response]:
    async with client_of(server, caller) as client:
        return [await client.post("/v1/completions", json=body | {"return_token_ids": True}) for _ in range(ASKS)]


async def tokens_alone(server: Server, caller: str) -> list[int]:
    stream = Stream(body_of(caller))
    async with client_of(server, caller, "") as client:
        await stream.run(client)
    assert stream.done
    return stream.tokens


def test_callers_have_the_same_id_at_once_and_each_retries_its_own(keyed: Server) -> None:
    async def main() -> None:
        alone = {caller: await tokens_alone(keyed, caller) for caller in UNLIMITED}
        callers = ("emil", "fay")
        await stream_at_once(keyed, callers, alone)

        for caller in callers:
            (first, *_) = await replies(keyed, caller, body_of(caller))
            assert first.json()["choices"][0]["token_ids"] == alone[caller]
            await settled(keyed, caller)
        before = keyed.metrics().total("store_replayed_total")
        proxies: set[str] = set()
        for caller in callers:
            for reply in await replies(keyed, caller, body_of(caller)):
                assert reply.status_code == httpx.codes.OK, reply.text
                assert reply.json()["choices"][0]["token_ids"] == alone[caller]
                proxies.add(reply.headers["x-aegis-proxy"])
        assert proxies == {"proxy-0", "proxy-1"}
        assert keyed.metrics().total("store_replayed_total") == before + 2 * ASKS

        for reply in await replies(keyed, "fay", body_of("emil")):
            assert (reply.status_code, reply.json()["error"]["code"]) == (422, "request_id_reused")
            assert f"'{ID}'" in reply.json()["error"]["message"]
        generated = keyed.metrics().total("generation_tokens_total")
        (first, *_) = await replies(keyed, "gil", body_of("gil"))
        assert first.json()["choices"][0]["token_ids"] == alone["gil"]
        assert keyed.metrics().total("generation_tokens_total") == generated + TOKENS, "hers is a new request"

    asyncio.run(main())


async def stream_at_once(server: Server, callers: tuple[str, str], alone: Mapping[str, list[int]]) -> None:
    """Both under one id, of which the first asks for its own once more. They leave in the end."""
    long_id = f"{ID}-long"
    streams = {caller: Stream(body_of(caller, LONG)) for caller in callers}
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for caller in callers:
            client = await stack.enter_async_context(client_of(server, caller, long_id))
            group.create_task(streams[caller].run(client))
        asking = await stack.enter_async_context(client_of(server, callers[0], long_id))
        await until(lambda: all(len(stream.tokens) >= TOKENS for stream in streams.values()), "both stream")
        busy = await asking.post("/v1/completions", json=body_of(callers[0], LONG))
        assert not any(stream.ended for stream in streams.values())
        for stream in streams.values():
            stream.leave()
    assert busy.status_code == httpx.codes.CONFLICT and busy.json()["error"]["code"] == "request_in_flight"
    assert f"'{long_id}'" in busy.json()["error"]["message"]
    assert {caller: stream.tokens[:TOKENS] for caller, stream in streams.items()} == {c: alone[c] for c in callers}
