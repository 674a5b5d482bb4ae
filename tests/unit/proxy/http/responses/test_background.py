"""`/v1/responses` in the background: found, cancelled and deleted while it runs, and within its bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from aegis.config.config import RedisSettings
from aegis.core.api_keys import Caller, Key, Keyring, digest_of
from aegis.core.errors import UserError
from aegis.core.limits import Limits
from aegis.core.request import FinishReason
from aegis.metadata.store import open_store
from proxy.http.app import create_app
from proxy.http.market import Delta, Failed, Finished
from proxy.http.responses import background
from proxy.http.responses.background import BACKGROUND_MAX, BackgroundResponses
from proxy.http.responses.stored_responses import ResponseMemory
from proxy.http.security.large_bodies import SMALL_BYTES
from tests.unit.proxy.http.responses.test_responses import PATH, ask, id_of_request, stalled
from tests.unit.proxy.http.scripted import TEXTS, ScriptedMarket, calling, keyring, market, post, tokens

SAME = {"x-request-id": "r"}


async def turns(count: int) -> None:
    """Of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def client_of(behind: ScriptedMarket) -> AsyncIterator[httpx.AsyncClient]:
    async with open_store(RedisSettings()) as store:
        app = create_app(behind, records=store.records, texts=TEXTS)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            yield client


async def asking(client: httpx.AsyncClient, behind: ScriptedMarket, **body: Any) -> asyncio.Task[httpx.Response]:
    """A client whose answer has begun, of the request `SAME`."""
    task = asyncio.create_task(client.post(PATH, json=ask(**body), headers=SAME))
    async with asyncio.timeout(20):
        while not behind.handles:
            await asyncio.sleep(0)
    return task


async def ended(client: httpx.AsyncClient, response_id: str) -> Any:
    async with asyncio.timeout(20):
        while (told := (await client.get(f"{PATH}/{response_id}")).json())["status"] == "in_progress":
            await asyncio.sleep(0)
    return told


@pytest.mark.parametrize("broke", [False, True])
def test_a_response_in_the_background_is_found_when_it_has_ended(broke: bool) -> None:
    may_end: asyncio.Event | None = None

    async def wait() -> None:
        assert may_end is not None
        await may_end.wait()

    def script(prompt: Any, sampling: Any) -> list[Any]:
        return [Delta(tokens("ab")), wait(), Failed("broke") if broke else Finished(FinishReason.STOP)]

    behind = market(script)

    async def talk(client: httpx.AsyncClient) -> None:
        nonlocal may_end
        may_end = asyncio.Event()
        same = {"x-request-id": "r"}
        begun = (await client.post(PATH, json=ask(background=True), headers=same)).json()
        assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
        assert (await client.get(f"{PATH}/{begun['id']}")).json() == begun
        assert (await client.post(PATH, json=ask(background=True), headers=same)).json() == begun, "a retry begins none"
        early = await client.post(PATH, json=ask("x", previous_response_id=begun["id"]))
        assert early.json()["error"]["code"] == "previous_response_not_ended"
        may_end.set()
        told = await ended(client, begun["id"])
        assert len(behind.submitted) == 1
        if broke:
            assert (told["status"], told["error"]) == ("failed", {"code": "server_error", "message": "broke"})
        else:
            assert told["output"][0]["content"][0]["text"] == "ab"
            assert (await client.post(PATH, json=ask("x", previous_response_id=begun["id"]))).status_code == 200

    calling(behind, talk)
    assert [permit.answer_tokens is None for permit in behind.permits] == [False] * len(behind.permits)


def test_a_response_in_the_background_is_looked_for_only_where_its_id_may_be_known() -> None:
    """A store that others write to looks a second time for what it does not find."""

    class Looked(ResponseMemory):
        times = 0

        async def find(self, key: str) -> bytes | None:
            self.times += 1
            return await super().find(key)

    async def begin(headers: dict[str, str]) -> int:
        kept = Looked()
        app = create_app(market(), texts=TEXTS, kept=kept)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            begun = (await client.post(PATH, json=ask(background=True), headers=headers)).json()
            looked = kept.times
            await ended(client, begun["id"])
        return looked

    assert asyncio.run(begin({})) == 0
    assert asyncio.run(begin({"x-request-id": "r"})) == 1


@pytest.mark.parametrize("proxies", [1, 2])
def test_a_retry_that_comes_before_it_is_kept_does_not_make_a_response_fail(proxies: int) -> None:
    class Slow(ResponseMemory):
        async def find(self, key: str) -> bytes | None:
            found = await super().find(key)
            await turns(50)
            return found

    async def main() -> None:
        may_end, kept = asyncio.Event(), Slow()
        behind = market(lambda *_: [Delta(tokens("ab")), may_end.wait(), Finished(FinishReason.STOP)])
        async with open_store(RedisSettings()) as store, AsyncExitStack() as stack:
            apps = [create_app(behind, records=store.records, texts=TEXTS, kept=kept) for _ in range(proxies)]
            transports = [httpx.ASGITransport(app=app) for app in apps]
            clients = [httpx.AsyncClient(transport=each, base_url="http://localhost") for each in transports]
            for client in clients:
                await stack.enter_async_context(client)
            first, last = clients[0], clients[-1]
            body, same = ask(background=True), {"x-request-id": "r"}
            asked = await asyncio.gather(*(each.post(PATH, json=body, headers=same) for each in (first, last)))
            begun, again = (reply.json() for reply in asked)
            assert begun["id"] == again["id"]
            async with asyncio.timeout(20):
                while not behind.handles:
                    await asyncio.sleep(0)
            await turns(500)
            assert (await first.get(f"{PATH}/{begun['id']}")).json()["status"] == "in_progress"
            may_end.set()
            assert (await ended(last, begun["id"]))["status"] == "completed"
        assert len(behind.submitted) == 1

    asyncio.run(main())


def test_a_response_whose_request_another_client_has_answered_comes_when_that_one_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.01)

    async def main() -> None:
        may_end = asyncio.Event()
        behind = market(lambda *_: [Delta(tokens("ab")), may_end.wait(), Finished(FinishReason.STOP)])
        async with client_of(behind) as client:
            leaving = await asking(client, behind, store=False)
            async with asyncio.timeout(20):
                begun = (await client.post(PATH, json=ask(background=True), headers=SAME)).json()
                await asyncio.sleep(0.1)
                assert (await client.get(f"{PATH}/{begun['id']}")).json() == begun and len(behind.handles) == 1
                leaving.cancel()
                may_end.set()
                assert (await ended(client, begun["id"]))["status"] == "completed"
        assert len(behind.handles) == 2

    asyncio.run(main())


def test_a_response_can_be_cancelled_after_a_retry_that_was_refused() -> None:
    behind, response_id = market(stalled), id_of_request("r")

    async def main() -> None:
        async with client_of(behind) as client:
            streaming = await asking(client, behind, stream=True)
            async with asyncio.timeout(20):
                assert (await client.post(PATH, json=ask(stream=True), headers=SAME)).status_code == 409
                cancelled = await client.post(f"{PATH}/{response_id}/cancel")
                assert cancelled.json()["status"] == "cancelled"
                await streaming

    asyncio.run(main())


def test_bad_input_for_the_background_is_refused_at_once() -> None:
    assert post(market(), PATH, ask(5, background=True)).status_code == 400


def test_a_permit_that_came_before_a_large_body_goes_to_the_background() -> None:
    behind = market()
    alice = Key(digest_of("secret"), Caller("alice", limits=Limits(concurrent=3)))

    async def talk(client: httpx.AsyncClient) -> None:
        body = ask(background=True, metadata={"large": "x" * (SMALL_BYTES + 1)})
        begun = await client.post(PATH, json=body, headers={"x-api-key": "secret"})
        assert (begun.status_code, behind.permits[0].answer_tokens) == (200, None)
        async with asyncio.timeout(20):
            while behind.permits[0].answer_tokens is None:
                await asyncio.sleep(0)

    calling(behind, talk, keys=Keyring((alice,)))
    assert [permit.answer_tokens for permit in behind.permits] == [len("hello")] * 2


def test_the_background_is_refused_at_once_beyond_the_limits_of_a_key() -> None:
    behind = market()
    behind.permit_refusals = [UserError("alice has 3 of 3 requests at once", status=429, code="rate_limit_exceeded")]
    alice = Key(digest_of("secret"), Caller("alice", limits=Limits(concurrent=3)))

    async def talk(client: httpx.AsyncClient) -> None:
        asked = await client.post(PATH, json=ask(background=True), headers={"x-api-key": "secret"})
        assert (asked.status_code, asked.json()["error"]["code"]) == (429, "rate_limit_exceeded")

    calling(behind, talk, keys=Keyring((alice,)))
    assert not behind.submitted and not behind.permits


def test_a_response_in_the_background_is_cancelled() -> None:
    behind = market(stalled)

    async def talk(client: httpx.AsyncClient) -> None:
        begun = (await client.post(PATH, json=ask(background=True))).json()
        while not behind.handles:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        cancelled = (await client.post(f"{PATH}/{begun['id']}/cancel")).json()
        assert (cancelled["status"], cancelled["output"][0]["status"]) == ("cancelled", "incomplete")
        assert await ended(client, begun["id"]) == cancelled

    calling(behind, talk)
    assert behind.handles[0].cancelled


def test_a_response_in_the_background_that_cannot_be_kept_has_failed() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": [""] * 40_000})}

    async def talk(client: httpx.AsyncClient) -> Any:
        first = (await client.post(PATH, json=ask([call, {"role": "user", "content": "x"}]))).json()["id"]
        again = ask([call, {"role": "user", "content": "x"}], previous_response_id=first, background=True)
        return await ended(client, (await client.post(PATH, json=again)).json()["id"])

    told = calling(market(), talk)
    assert told["status"] == "failed" and "strings, lists and objects" in told["error"]["message"]


def test_a_response_that_is_deleted_in_the_background_ends_and_is_not_kept_again() -> None:
    behind = market(stalled)

    async def talk(client: httpx.AsyncClient) -> None:
        begun = (await client.post(PATH, json=ask(background=True))).json()
        while not behind.handles:
            await asyncio.sleep(0)
        assert (await client.delete(f"{PATH}/{begun['id']}")).json()["deleted"]
        for _ in range(50):
            await asyncio.sleep(0)
        assert behind.handles[0].cancelled
        assert (await client.get(f"{PATH}/{begun['id']}")).status_code == 404

    calling(behind, talk)


@pytest.mark.parametrize("named", [True, False])
def test_one_caller_has_half_of_the_background(named: bool) -> None:
    def script(prompt: Any, sampling: Any) -> list[Any]:
        return [asyncio.Event().wait(), Finished(FinishReason.STOP)]

    async def talk(client: httpx.AsyncClient) -> None:
        alice, bob = ({"x-api-key": name} for name in "ab")
        begun = [await client.post(PATH, json=ask(background=True), headers=alice) for _ in range(BACKGROUND_MAX // 2)]
        assert {reply.status_code for reply in begun} == {200}
        refused = await client.post(PATH, json=ask(background=True), headers=alice)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_background")
        assert refused.headers["retry-after"]
        other = await client.post(PATH, json=ask(background=True), headers=bob)
        assert other.status_code == (200 if named else 429)
        while len(behind.handles) < len(begun) + named:
            await asyncio.sleep(0)
        await client.post(f"{PATH}/{begun[0].json()['id']}/cancel", headers=alice)
        for _ in range(50):
            await asyncio.sleep(0)
        assert (await client.post(PATH, json=ask(background=True), headers=alice)).status_code == 200
        while len(behind.handles) < len(begun) + named + 1:
            await asyncio.sleep(0)

    behind = market(script)
    calling(behind, talk, keys=keyring(alice="a", bob="b") if named else None)


def test_the_background_holds_so_many_bytes_of_conversations() -> None:
    places = BackgroundResponses(most=100, bytes_max=100)
    places.take("alice", 60, "a")
    with pytest.raises(UserError, match="background"):
        places.take("alice", 1, "b")
    first = places.take("bob", 30, "c")
    with pytest.raises(UserError, match="background"):
        places.take("carol", 11, "d")
    places.leave(first)
    places.take("carol", 11, "d")
