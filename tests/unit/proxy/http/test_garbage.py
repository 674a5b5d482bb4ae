"""A request that has ended leaves no cycle of objects: they would be kept until they are collected, with its prompt and
its answer, and to collect them stops the proxy."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.long_forms import first_of
from tests.unit.proxy.http.scripted import EOS, calling, market, says

TIMES = 20
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 5},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 5},
}


@pytest.mark.parametrize("stream", first_of(1, [True, False]))
@pytest.mark.parametrize("route", first_of(2, list(ROUTES)))
def test_a_request_leaves_no_cycles(route: str, stream: bool) -> None:
    body = {"model": "m", "stream": stream} | ROUTES[route]

    async def ask(client: httpx.AsyncClient) -> list[int]:
        async def once() -> httpx.Response:
            return await client.post(route, json=body)

        async def other() -> httpx.Response:
            return await client.post("/nowhere", json=body)  # what the client leaves

        return [await garbage(each) for each in (once, other)]

    left, of_client = calling(market(says([*b"hello", EOS])), ask)
    assert left < of_client + 10 * TIMES


async def garbage(ask: Callable[[], Awaitable[object]]) -> int:
    """The objects in cycles that so many requests leave."""
    await ask()
    gc.collect()
    gc.freeze()  # what others have is not looked at again
    gc.disable()
    try:
        for _ in range(TIMES):
            await ask()
        return gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
