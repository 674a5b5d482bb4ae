"""A request for a model that is on its way waits for it, and says so meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from aegis.config.config import RedisSettings
from aegis.metadata.store import open_store
from aegis.telemetry.registration import RegisteringModel
from proxy.http.app import create_app
from tests.event_laws import check_messages, check_responses, events_of
from tests.unit.proxy.http.scripted import TEXTS, ScriptedMarket, ScriptedModel, calling, market, says, spec

PATHS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


def expecting() -> ScriptedMarket:
    behind = market()
    behind.registering["new"] = RegisteringModel("/checkpoints/new", "reading")
    return behind


def asked(behind: ScriptedMarket, path: str, came: bool, **more: Any) -> httpx.Response:
    """What is answered where the model comes, or does not, a moment after it was asked for."""

    async def calls(client: httpx.AsyncClient) -> httpx.Response:
        asking = asyncio.create_task(client.post(path, json=PATHS.get(path, {}) | {"model": "new"} | more))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asking.done() and not behind.submitted
        if came:
            behind.served["new"] = ScriptedModel(spec("new"), says("hello"))
        del behind.registering["new"]
        return await asking

    reply: httpx.Response = calling(behind, calls)
    return reply


@pytest.mark.parametrize("path", PATHS)
def test_it_is_answered_when_the_model_has_come(path: str) -> None:
    behind = expecting()
    reply = asked(behind, path, came=True)
    assert reply.status_code == 200 and "hello" in reply.text
    assert [permit.answer_tokens for permit in behind.permits] == [5]


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_begins_at_once_and_says_what_it_waits_for(path: str) -> None:
    behind = expecting()
    lines = [line for line in asked(behind, path, came=True, stream=True).text.splitlines() if line]
    assert lines[0] == ": model 'new' is being registered: reading"
    assert lines[-1] == "data: [DONE]" and len(lines) > 5
    assert [permit.answer_tokens for permit in behind.permits] == [5]


MESSAGES = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]}), ("/v1/messages/count_tokens", MESSAGES)],
)
def test_what_needs_its_tokenizer_only_waits_for_it_too(path: str, body: dict[str, Any]) -> None:
    assert asked(expecting(), path, came=True, **body).status_code == 200
    reply = asked(expecting(), path, came=False, **body)
    assert reply.status_code == 404 and "there is no model 'new'" in reply.text


@pytest.mark.parametrize("path", PATHS)
def test_where_it_does_not_come_that_is_told(path: str) -> None:
    assert asked(expecting(), path, came=False).status_code == 404
    *_, last = [line for line in asked(expecting(), path, came=False, stream=True).text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "model_not_found"


def test_what_is_refused_after_the_wait_ends_the_stream() -> None:
    *_, last = [
        line for line in asked(expecting(), "/v1/completions", came=True, stream=True, n=0).text.splitlines() if line
    ]
    assert json.loads(last.removeprefix("data: "))["error"]["param"] == "n"


def lazy(behind: ScriptedMarket, tries: int = 0, refusal: str = "") -> ScriptedMarket:
    behind.registering["new"] = RegisteringModel("hf://org/new", "waits", True, tries, refusal)
    return behind


@pytest.mark.parametrize("path", PATHS)
def test_a_lazy_model_is_wanted_by_its_first_request_and_answered_when_it_has_come(path: str) -> None:
    behind = lazy(market())
    reply = asked(behind, path, came=True)
    assert reply.status_code == 200 and "hello" in reply.text
    assert behind.wanted == ["new"]
    behind = lazy(market())
    lines = [line for line in asked(behind, path, came=True, stream=True).text.splitlines() if line]
    assert lines[0] == ": model 'new' is being registered: waits" and lines[-1] == "data: [DONE]"
    assert behind.wanted == ["new"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_lazy_model_that_does_not_come_is_told_and_may_be_tried_again(stream: bool) -> None:
    behind = lazy(market(), tries=1, refusal="an earlier one")

    async def calls(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        body = PATHS["/v1/completions"] | {"model": "new", "stream": stream}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asking.done(), "what failed before it came is not its concern"
        lazy(behind, tries=2, refusal="the hub is away")
        first = await asking
        again = asyncio.create_task(client.post("/v1/completions", json=body))
        for _ in range(20):
            await asyncio.sleep(0)
        lazy(behind, tries=3, refusal="it is still away")
        return first, await again

    for reply, told in zip(calling(behind, calls), ("the hub is away", "it is still away"), strict=True):
        text = reply.text.splitlines()[-2].removeprefix("data: ") if stream else reply.text
        error = json.loads(text)["error"]
        assert (error["code"], error["message"]) == ("model_not_fetched", f"model 'new' cannot be served now: {told}")
        assert stream or reply.status_code == 503
    assert behind.wanted == ["new", "new"]


def test_lazy_models_are_listed_as_such() -> None:
    (coming,) = calling(lazy(market()), lambda client: client.get("/v1/models")).json()["coming"]
    assert (coming["id"], coming["state"], coming["detail"]) == ("new", "lazy", "waits")


def test_a_model_may_be_added_lazily() -> None:
    body = {"source": "hf://org/new", "name": "new", "lazy": True}
    reply = calling(market(), lambda client: client.post("/models/load", json=body))
    assert (reply.status_code, reply.json()["state"], reply.json()["root"]) == (200, "lazy", "hf://org/new")


def test_models_on_their_way_are_listed() -> None:
    listed = calling(expecting(), lambda client: client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["m"]
    (coming,) = listed["coming"]
    assert (coming["id"], coming["state"], coming["detail"]) == ("new", "registering", "reading")
    assert calling(expecting(), lambda client: client.get("/v1/models/new")).json() == coming


@pytest.mark.parametrize("path", ["/models/update", "/models/evict"])
def test_one_on_its_way_cannot_be_changed_yet_and_that_is_said(path: str) -> None:
    reply = calling(expecting(), lambda client: client.post(path, json={"model": "new"}))
    told = "model 'new' is not served yet: reading"
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, told)


def test_a_retry_of_a_stream_that_waits_is_not_answered_twice() -> None:
    """Its id is known to the client before its answer begins."""
    behind = expecting()
    body = json.dumps(PATHS["/v1/completions"] | {"model": "new", "stream": True}).encode()

    async def main() -> None:
        async with open_store(RedisSettings()) as store:
            app, stream = create_app(behind, records=store.records, texts=TEXTS), Stream(body)
            waiting = asyncio.create_task(app(SCOPE, stream.receive, stream.send))
            await stream.begun.wait()
            behind.served["new"] = ScriptedModel(spec("new"), says("hello"))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                retry = await client.post("/v1/completions", content=body, headers={"X-Request-Id": stream.request_id})
            del behind.registering["new"]
            await waiting
        assert "data: [DONE]" in retry.text
        assert len(behind.submitted) == 1
        assert "request_in_flight" in stream.text() or answer(stream.text()) == answer(retry.text)

    asyncio.run(main())


SCOPE: dict[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "client": ("127.0.0.1", 1),
    "server": ("aegis", 80),
    "scheme": "http",
}


class Stream:
    """A client that sees the head of its answer before the rest, as httpx does not within a process."""

    def __init__(self, body: bytes) -> None:
        self.begun = asyncio.Event()
        self.request_id = ""
        self._bodies = [body]
        self._read = b""

    async def receive(self) -> dict[str, Any]:
        if not self._bodies:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._bodies.pop(), "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.request_id = dict(message["headers"])[b"x-request-id"].decode()
            self.begun.set()
        self._read += message.get("body", b"")

    def text(self) -> str:
        return self._read.decode()


def answer(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


TRANSLATED = {
    "/v1/messages": ({"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}, check_messages),
    "/v1/responses": ({"input": "x"}, check_responses),
}


@pytest.mark.parametrize("path", TRANSLATED)
@pytest.mark.parametrize("came", [False, True])
def test_translated_streams_that_waited_keep_the_laws_of_their_events(path: str, came: bool) -> None:
    body, check = TRANSLATED[path]
    stream = asked(expecting(), path, came, stream=True, **body).text
    assert stream.startswith(": model 'new' is being registered: reading")
    check(events_of(stream))
    assert ("there is no model 'new'" in stream) != came
