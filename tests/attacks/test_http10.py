"""HTTP/1.0 knows no chunks and keeps no connection unless it asks to."""

from __future__ import annotations

import json

import pytest

from tests.attacks.harness import HONEST, recorded
from tests.attacks.wire import Heard, Wire
from tests.live.server import Server

MAIN = "/v1/completions"


def ask(server: Server, first: str, body: bytes = b"", *headers: str) -> Heard:
    lines = [f"{first} HTTP/1.0", "Host: localhost", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    with Wire(server.url) as wire:
        wire.send("\r\n".join([*lines, "", ""]).encode() + body)
        return wire.hear(count=1, methods=(first.split()[0].encode(),))


def test_a_stream_has_no_chunks_and_ends_with_the_connection(server: Server) -> None:
    heard = ask(server, f"POST {MAIN}", json.dumps(HONEST | {"stream": True, "return_token_ids": True}).encode())
    (response,) = heard.responses
    assert heard.closed and response.status == 200
    assert b"transfer-encoding" not in response.headers and b"content-length" not in response.headers
    *events, done = [event.removeprefix(b"data: ") for event in response.body.split(b"\n\n") if event]
    assert done == b"[DONE]"
    tokens = [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]
    assert tokens == recorded(server)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/", "/nowhere"])
def test_whole_answers_have_their_length_or_end_with_the_connection(server: Server, path: str) -> None:
    heard = ask(server, f"GET {path}")
    (response,) = heard.responses
    assert heard.closed and not heard.rest and b"transfer-encoding" not in response.headers


def test_a_body_is_read(server: Server) -> None:
    heard = ask(server, f"POST {MAIN}", json.dumps(HONEST | {"max_tokens": 2}).encode())
    assert heard.statuses == [200] and heard.closed
    assert json.loads(heard.responses[0].body)["usage"]["completion_tokens"] == 2


def test_a_head_has_no_body(server: Server) -> None:
    heard = ask(server, "HEAD /health")
    assert heard.statuses == [200] and heard.closed and not heard.rest


def test_a_stream_that_is_refused_is_told_so(server: Server) -> None:
    heard = ask(server, f"POST {MAIN}", json.dumps(HONEST | {"stream": True, "model": "nobody"}).encode())
    assert heard.statuses == [404] and heard.closed
    assert "nobody" in json.loads(heard.responses[0].body)["error"]["message"]


def test_a_connection_is_kept_for_who_says_so_or_closed_and_nothing_else(server: Server) -> None:
    kept = ask(server, "GET /health", b"", "Connection: keep-alive")
    assert kept.statuses == [200]
    assert kept.closed or kept.responses[0].headers.get(b"connection", b"").lower() == b"keep-alive"


def test_no_host_is_needed(server: Server) -> None:
    with Wire(server.url) as wire:
        wire.send(b"GET /health HTTP/1.0\r\n\r\n")
        heard = wire.hear(count=1)
    assert heard.statuses == [200] and heard.closed
