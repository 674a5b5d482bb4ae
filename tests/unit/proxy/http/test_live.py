"""Over real connections: the official client, what a stream looks like on the wire, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from aegis.core.request import FinishReason
from aegis.telemetry.logs import LineFormatter
from proxy.http.market import Delta, Finished
from proxy.http.request.worker_thread import beside_loop
from proxy.http.security.http_protocol import Protocol
from tests.long_forms import first_of
from tests.unit.proxy.http.live import serving
from tests.unit.proxy.http.scripted import ScriptedMarket, market, says, tokens

WAIT_S = 10


@pytest.fixture(scope="module")
def hello() -> Iterator[str]:
    with serving(market(says("héllo €"))) as url:
        yield url


@pytest.fixture
def client(hello: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=hello + "/v1", api_key="none", max_retries=0)


def test_the_openai_client_completes(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="m", prompt="x", logprobs=1)
    assert whole.choices[0].text == "héllo €"
    assert whole.usage and whole.usage.completion_tokens == 10
    parts = [*client.completions.create(model="m", prompt="x", stream=True, stream_options={"include_usage": True})]
    assert "".join(choice.text for part in parts for choice in part.choices) == "héllo €"
    assert parts[-1].usage == whole.usage


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "x"}]
    whole = client.chat.completions.create(model="m", messages=asked, n=2, logprobs=True, top_logprobs=1)
    assert [choice.message.content for choice in whole.choices] == ["héllo €"] * 2
    parts = [*client.chat.completions.create(model="m", messages=asked, stream=True)]
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "héllo €"
    with client.chat.completions.stream(model="m", messages=asked) as stream:
        assert stream.get_final_completion().choices[0].message.content == "héllo €"


def test_the_openai_client_lists_models_and_understands_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError, match="did you mean"):
        client.completions.create(model="mm", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="x", temperature=9)
    assert caught.value.param == "temperature"


class Gate:
    """Something a script waits for and a test opens, from another thread."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __await__(self) -> Iterator[Any]:
        self._loop = asyncio.get_running_loop()
        self.reached.set()
        return self._event.wait().__await__()

    def open(self) -> None:
        assert self.reached.wait(WAIT_S)
        assert self._loop
        self._loop.call_soon_threadsafe(self._event.set)


def gated() -> tuple[ScriptedMarket, Gate]:
    """A market whose sequences say `a`, wait at the gate and say `b`."""
    gate = Gate()
    deliveries = [Delta(tokens("a")), gate, Delta(tokens("b")), Finished(FinishReason.LENGTH)]
    return market(lambda prompt, sampling: deliveries), gate


def test_silence_is_filled_with_comments_and_events_come_as_they_are_made() -> None:
    behind, gate = gated()
    body = {"model": "m", "prompt": "x", "stream": True}
    with (
        serving(behind, keep_alive_s=0.02) as url,
        httpx.stream("POST", url + "/v1/completions", json=body, timeout=WAIT_S) as reply,
    ):
        lines = (line for line in reply.iter_lines() if line)
        assert '"text":"a"' in next(lines)
        assert next(lines) == next(lines) == ": waiting, 2 requests come before this one"
        behind.served["m"].detail = "it is fetched"
        assert ": waiting, 2 requests come before this one; of the model: it is fetched" in lines
        gate.open()
        rest = [line for line in lines if not line.startswith(":")]
    assert '"text":"b"' in rest[0]
    assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_frees_its_sequences(path: str, stream: bool) -> None:
    behind, gate = gated()
    cancelled = threading.Event()
    submit = behind.submit

    def watched(*arguments: Any, **options: Any) -> Any:
        handle = submit(*arguments, **options)
        cancel = handle.cancel

        def seen(*, satisfied: bool = False) -> None:
            cancel(satisfied=satisfied)
            cancelled.set()

        handle.cancel = seen  # type: ignore[method-assign]
        return handle

    behind.submit = watched  # type: ignore[method-assign]
    body = {"model": "m", "stream": stream}
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    with serving(behind) as url:

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
                asking = asyncio.create_task(client.post(path, json=body))
                await asyncio.to_thread(gate.reached.wait, WAIT_S)
                asking.cancel()

        asyncio.run(leave())
        assert cancelled.wait(WAIT_S)
    assert behind.handles[0].cancelled


def test_the_body_of_a_client_that_has_left_is_not_parsed() -> None:
    behind, go_on = market(says("a")), threading.Event()
    busy = threading.Thread(target=lambda: asyncio.run(beside_loop(lambda: go_on.wait(WAIT_S), 1, few=0)))
    busy.start()
    try:
        with serving(behind) as url:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + "/v1/completions", content=b" " * 100_000, timeout=0.2)
            deadline_s = time.monotonic() + WAIT_S / 2
            while not behind.answers and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert behind.answers == [("/v1/completions", 499)]
    finally:
        go_on.set()
        busy.join()


def test_choices_are_interleaved_as_they_come() -> None:
    gates = [Gate(), Gate()]

    def script(prompt: Any, sampling: Any) -> list[Any]:
        return [gates[len(behind.submitted) - 1], Delta(tokens("x")), Finished(FinishReason.LENGTH)]

    behind = market(script)
    body = {"model": "m", "prompt": "x", "stream": True, "n": 2}
    with serving(behind) as url, httpx.stream("POST", url + "/v1/completions", json=body, timeout=WAIT_S) as reply:
        lines = (line for line in reply.iter_lines() if line)
        gates[1].open()
        assert ['"index":1' in next(lines) for _ in range(2)] == [True, True]
        gates[0].open()
        assert ['"index":0' in next(lines) for _ in range(2)] == [True, True]


def test_a_client_that_reads_nothing_is_cut_off_and_nobody_else_waits() -> None:
    """It asks for more than buffers hold, and reads none of it."""
    much = [Delta(tokens("x" * 100)) for _ in range(2_000)]

    def script(prompt: Any, sampling: Any) -> list[Any]:
        return [*(much if sampling.logprobs else [Delta(tokens("x"))]), Finished(FinishReason.LENGTH)]

    behind = market(script)
    greedy = json.dumps({"model": "m", "prompt": "x", "stream": True, "logprobs": 20}).encode()
    with (
        serving(behind, keep_alive_s=0.02, reader_timeout_s=0.5) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as slow,
    ):
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(greedy) + greedy)
        slow.settimeout(WAIT_S)
        until(lambda: bool(behind.handles))
        for _ in range(3):
            reply = httpx.post(url + "/v1/completions", json={"model": "m", "prompt": "x"}, timeout=WAIT_S)
            assert reply.json()["choices"][0]["text"] == "x"
        until(lambda: behind.permits[0].answer_tokens is not None)
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(1 << 20):
                pass
    assert not behind.handles[0].ended


@pytest.mark.parametrize("ends", first_of(1, [b"keep-alive", b"close"]))
def test_an_answer_that_is_made_and_not_read_is_not_kept_for_ever(ends: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protocol, "patience_s", 0.2)
    lost, let_go = threading.Event(), Protocol.connection_lost

    def seen(connection: Protocol, error: Exception | None) -> None:
        let_go(connection, error)
        lost.set()

    monkeypatch.setattr(Protocol, "connection_lost", seen)
    behind = market(lambda prompt, sampling: [*[Delta(tokens("x" * 100))] * 1_500, Finished(FinishReason.LENGTH)])
    body = json.dumps({"model": "m", "prompt": "x", "logprobs": 20}).encode()
    with serving(behind) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: %s\r\ncontent-length: %d\r\n\r\n"
        client.sendall(head % (ends, len(body)) + body)
        until(lambda: behind.answers == [("/v1/completions", 200)])
        assert lost.wait(WAIT_S)


def said(port: int, *parts: bytes) -> tuple[int, Any]:
    """What is answered to a client that sends these and waits for the end; nothing is status 0."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
        reply = b""
        with contextlib.suppress(ConnectionError):
            while part := client.recv(1 << 16):
                reply += part
    head, _, body = reply.partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)) if reply else (0, None)


LONG_HEADS = {
    "one field, in parts": (b"GET /health HTTP/1.1\r\nx-long: ", *[b"y" * 8192] * 16),
    "one field, at once": (b"GET /health HTTP/1.1\r\nx-long: " + b"y" * 70_000 + b"\r\n\r\n",),
    "many fields, at once": (b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 12_000 + b"\r\n",),
    "an address": (b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\n\r\n",),
}


@pytest.mark.parametrize("parts", LONG_HEADS.values(), ids=LONG_HEADS)
def test_heads_are_bounded(parts: tuple[bytes, ...]) -> None:
    with serving(market()) as url:
        status, body = said(int(url.rpartition(":")[2]), *parts)
        assert (status, list(body["error"])) == (431, ["message", "type", "param", "code"])
        assert httpx.get(url + "/health", headers={"x-long": "y" * 60_000}).status_code == 200


@pytest.mark.parametrize(
    ("sent", "status", "code", "message"),
    [
        (b"\x16\x03\x01 hello\r\n\r\n", 400, "invalid_http", "this server speaks plain HTTP: use http://"),
        (b"\x15 hello\r\n\r\n", 400, "invalid_http", "this is no HTTP/1.1 request"),
        (b"BREW", 400, "invalid_http", "this is no HTTP/1.1 request"),
        (b"GET / HTTP/1.1\r\nho st: x\r\n\r\n", 400, "invalid_http", "this is no HTTP/1.1 request"),
        (
            b"BREW /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
            501,
            "unknown_method",
            "the method BREW is not known: use GET or POST",
        ),
    ],
    ids=["TLS", "garbage", "a word", "a bad head", "method"],
)
def test_what_is_no_http_is_told_so(sent: bytes, status: int, code: str, message: str) -> None:
    with serving(market()) as url:
        answered, body = said(int(url.rpartition(":")[2]), sent)
        assert (answered, body["error"]["code"], body["error"]["message"]) == (status, code, message)
        assert httpx.get(url + "/health").status_code == 200


COMPLETE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", COMPLETE, COMPLETE + b'{"model": '], ids=str)
def test_the_rest_of_a_request_is_not_waited_for_for_ever(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protocol, "patience_s", 0.2)
    with serving(market()) as url:
        status, body = said(int(url.rpartition(":")[2]), sent)
        assert (status, body and body["error"]["code"]) == ((408, "request_timeout") if sent else (0, None))
        assert httpx.get(url + "/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_that_does_not_come_is_a_request_like_any_other(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under its id, logged and counted as what its client is told."""
    monkeypatch.setattr(Protocol, "patience_s", 0.2)
    behind = market()
    sent = COMPLETE.replace(b"/v1/completions", path.encode()).replace(b"host: x", b"host: x\r\nx-request-id: mine")
    with caplog.at_level(logging.INFO), serving(behind) as url, socket.socket() as client:
        client.settimeout(WAIT_S)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(sent + b'{"model": ')
        reply = b""
        while part := client.recv(1 << 16):
            reply += part
        until(lambda: bool(behind.answers))
    assert reply.startswith(b"HTTP/1.1 408 ") and reply.count(b"HTTP/1.1") == 1
    assert b"\r\nx-request-id: mine\r\n" in reply and b"\r\nconnection: close\r\n" in reply
    assert behind.answers == [(path, 408)]
    (line,) = [LineFormatter().format(record) for record in caplog.records if record.message == "request"]
    assert "request_id=mine" in line and "status=408" in line


@pytest.mark.parametrize("sent", [b"POST /v1/comp", b"\x16\x03\x01 hello\r\n\r\n"], ids=["late", "no HTTP"])
def test_what_is_no_request_yet_is_answered_under_an_id_too(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protocol, "patience_s", 0.2)
    with serving(market()) as url, socket.socket() as client:
        client.settimeout(WAIT_S)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(sent)
        assert b"\r\nx-request-id: " in client.recv(1 << 16)


@pytest.mark.parametrize("more", ["all of the next", "its beginning"])
def test_a_request_that_is_there_is_not_hurried(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what follows on its connection, and waits for its answer, get into that."""
    monkeypatch.setattr(Protocol, "patience_s", 0.1)

    def script(prompt: Any, sampling: Any) -> list[Any]:
        waited = [asyncio.sleep(0.3), Delta(tokens("x"))]
        return [*waited, asyncio.sleep(0.3), Delta(tokens("y")), Finished(FinishReason.STOP)]

    body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    last = request.replace(b"host: x", b"host: x\r\nconnection: close")
    with (
        serving(market(script)) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client,
    ):
        client.settimeout(WAIT_S)
        client.sendall(request + (last if more == "all of the next" else last[:20]))
        reply = b""
        while part := client.recv(1 << 16):
            reply += part
    first, _, second = reply.partition(b"data: [DONE]")
    assert first.startswith(b"HTTP/1.1 200 OK") and b"HTTP/1.1 408" not in first
    assert (b"data: [DONE]" if more == "all of the next" else b"HTTP/1.1 408 ") in second


def test_what_is_under_way_when_the_server_ends_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """An upload of which a part is still to come."""
    with socket.socket() as client:
        with serving(market()) as url:
            client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            client.sendall(COMPLETE + b'{"model": ')
            assert httpx.get(url + "/health").status_code == 200
        client.settimeout(WAIT_S)
        reply = client.recv(1 << 16)
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after" in reply and b"shutting down" in reply and b'"code":"shutting_down"' in reply
    assert not [record for record in caplog.records if "Exception" in record.message]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
