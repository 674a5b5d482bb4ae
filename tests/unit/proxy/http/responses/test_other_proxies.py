"""Responses of `/v1/responses` that are asked for at another proxy than the one that generates them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from aegis.core.request import FinishReason
from proxy.http.app import create_app
from proxy.http.market import Delta, Failed, Finished
from proxy.http.responses.stored_responses import NodeResponses, ResponseMemory, key_of
from tests.event_laws import events_of
from tests.unit.proxy.http.responses.test_background import ended
from tests.unit.proxy.http.responses.test_responses import PATH, ask, id_of_request
from tests.unit.proxy.http.scripted import TEXTS, ScriptedMarket, market, tokens


def never_ends(prompt: Any, sampling: Any) -> list[Any]:
    return [Delta(tokens("ab")), asyncio.Event().wait(), Finished(FinishReason.STOP)]


def both(
    behind: ScriptedMarket, talk: Callable[[httpx.AsyncClient, httpx.AsyncClient], Coroutine[Any, Any, Any]]
) -> Any:
    """What `talk` makes of clients of two proxies of one node: the other one's responses are `elsewhere`."""
    here = create_app(behind, texts=TEXTS, kept=NodeResponses(behind))
    there = create_app(behind, texts=TEXTS, kept=NodeResponses(behind), running=behind.elsewhere)

    async def run() -> Any:
        clients = [
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")
            for app in (here, there)
        ]
        return await talk(*clients)

    return asyncio.run(run())


@pytest.mark.parametrize("begun", [True, False])
def test_a_response_that_another_proxy_generates_is_seen_and_cancelled(begun: bool) -> None:
    behind = market(never_ends)

    async def talk(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        first = (await there.post(PATH, json=ask(background=True))).json()
        assert (await here.get(f"{PATH}/{first['id']}")).json() == first
        for _ in range(50 * begun):
            await asyncio.sleep(0)
        cancelled = (await here.post(f"{PATH}/{first['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert await ended(here, first["id"]) == await ended(there, first["id"]) == cancelled
        again = await here.post(f"{PATH}/{first['id']}/cancel")
        assert (again.status_code, again.json()) == (200, cancelled)

    both(behind, talk)
    assert [handle.cancelled for handle in behind.handles] == [True]


def test_a_stream_of_another_proxy_is_cancelled() -> None:
    behind, response_id = market(never_ends), id_of_request("r")

    async def talk(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        asked = asyncio.create_task(there.post(PATH, json=ask(stream=True), headers={"x-request-id": "r"}))
        while not behind.handles:
            await asyncio.sleep(0)
        cancelled = (await here.post(f"{PATH}/{response_id}/cancel")).json()
        assert events_of((await asked).text)[-1]["response"] == cancelled
        assert cancelled["status"] == "cancelled"

    both(behind, talk)


def test_a_response_whose_proxy_is_lost_is_cancelled_as_it_was() -> None:
    behind = market()

    async def talk(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        begun = (await there.post(PATH, json=ask(background=True))).json()
        await ended(there, begun["id"])
        stored = json.dumps({"response": begun, "conversation": []}).encode()
        await behind.responses.keep(key_of("", begun["id"]), stored)  # as if it had not come to its end
        cancelled = (await here.post(f"{PATH}/{begun['id']}/cancel")).json()
        assert cancelled == begun | {"status": "cancelled"}
        assert (await here.get(f"{PATH}/{begun['id']}")).json() == cancelled

    both(behind, talk)


class SlowMemory(ResponseMemory):
    """Keeps nothing but what has just begun until it `may` keep more."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.asked = asyncio.Event(), asyncio.Event()

    async def keep(self, key: str, stored: bytes) -> None:
        if b"in_progress" not in stored:
            self.asked.set()
            await self.may.wait()
        await super().keep(key, stored)


def test_a_response_that_fails_is_not_cancelled_while_that_is_being_kept() -> None:
    behind = market(lambda *_: [Failed("broke")])

    async def main() -> None:
        slow = SlowMemory()
        app = create_app(behind, texts=TEXTS, kept=slow)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            begun = (await client.post(PATH, json=ask(background=True))).json()
            await slow.asked.wait()
            cancelling = asyncio.create_task(client.post(f"{PATH}/{begun['id']}/cancel"))
            for _ in range(50):
                await asyncio.sleep(0)
            assert not cancelling.done()
            slow.may.set()
            assert (await cancelling).json()["error"]["message"] == "the response has ended: it is failed"

    asyncio.run(main())
