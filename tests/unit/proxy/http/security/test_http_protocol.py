"""Bounds on a connection's input, and the number of replies: forms that servers in front of this one may read
differently."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPResponse

import pytest

from proxy.http.market import Delta
from proxy.http.security.http_protocol import FRAMING_BYTES_MAX, HEADERS_MAX, Connections, Protocol
from tests.unit.proxy.http.live import serving
from tests.unit.proxy.http.scripted import market, says, tokens

WAIT_S = 10
BODY = json.dumps({"model": "m", "prompt": "x"}).encode()
STREAM = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
INNER = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
ONE_CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(market(says("ab"))) as url:
        yield int(url.rpartition(":")[2])


def reply(port: int, parts: Iterable[bytes]) -> bytes:
    """All that comes until the end of the connection, which is waited for."""
    received = b""
    with socket.create_connection(("127.0.0.1", port)) as client, contextlib.suppress(ConnectionError):
        client.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
        while part := client.recv(1 << 16):
            received += part
    return received


@contextlib.contextmanager
def connected(port: int, *sent: bytes, size_bytes: int = 0) -> Iterator[list[socket.socket]]:
    """A connection for each; `size_bytes` of its receive buffer, where it is not what the system gives."""
    with contextlib.ExitStack() as stack:
        clients = []
        for each in sent:
            client = stack.enter_context(socket.socket())
            if size_bytes:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size_bytes)
            client.settimeout(WAIT_S)
            client.connect(("127.0.0.1", port))
            client.sendall(each)
            clients.append(client)
        yield clients


def status(client: socket.socket) -> int:
    """Of the next response, which is read."""
    response = HTTPResponse(client)
    response.begin()
    response.read()
    return response.status


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def post(*headers: bytes, body: bytes = BODY, version: bytes = b"1.1") -> bytes:
    head = [b"POST /v1/completions HTTP/%s" % version, b"host: x", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", body])


@pytest.mark.parametrize("parts", [1, 2, 1000])
@pytest.mark.parametrize("connection", [b"Upgrade, close", b"close, keep-alive , upgrade"])
def test_a_body_behind_an_upgrade_is_a_body(port: int, connection: bytes, parts: int) -> None:
    """However the pieces fall: none of it is the next request."""
    sent = post(b"connection: " + connection, b"upgrade: h2c", b"http2-settings: AAMAAABk")
    size = -(-len(sent) // parts)
    received = reply(port, (sent[i : i + size] for i in range(0, len(sent), size)))
    assert statuses(received) == [200]
    sent = post(b"connection: " + connection, b"upgrade: foo", body=INNER)
    received = reply(port, [sent[: -len(INNER)], INNER])
    assert statuses(received) == [400]


def test_a_chunked_body_behind_an_upgrade_is_a_body_and_the_next_request_is_one(port: int) -> None:
    sent = CHUNKED.replace(b"connection: close", b"connection: upgrade\r\nupgrade: websocket")
    received = reply(port, [sent, ONE_CHUNK, b"0\r\n\r\n" + INNER.replace(b"host", b"connection: close\r\nhost")])
    assert statuses(received) == [200, 200]


@pytest.mark.parametrize(
    "sent",
    [
        INNER.replace(b"host: x\r\n", b""),
        INNER.replace(b"host: x", b"host: x\r\nhost: y"),
        INNER.replace(b"1.1", b"2.0"),
        b"GET /\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        CHUNKED.replace(b"chunked", b"xchunked") + b"0\r\n\r\n",
        CHUNKED.replace(b"chunked", b"identity\r\ntransfer-encoding: chunked") + b"0\r\n\r\n",
        CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
        CHUNKED + ONE_CHUNK.replace(b"\r\n", b"\n") + b"0\n\n",
        CHUNKED + b"5\r\nabc\r\n" + b"0\r\n\r\n",
    ],
    ids=str,
)
def test_what_another_server_may_take_for_something_else_is_refused(port: int, sent: bytes) -> None:
    received = reply(port, [sent, INNER])
    assert statuses(received) == [400]
    assert b"\r\nconnection: close\r\n" in received


def test_trailers_are_no_headers(port: int) -> None:
    received = reply(port, [CHUNKED, ONE_CHUNK, b"0\r\nx-request-id: mine\r\nexpect: 100-continue\r\n\r\n"])
    assert received.startswith(b"HTTP/1.1 200 ") and b"mine" not in received


@pytest.mark.parametrize(
    "endless",
    [b"x-n: aaaaaaaa\r\n", b"a", b";a=b"],
    ids=["many trailers", "one trailer", "an extension"],
)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/models", b"/nowhere"])
def test_framing_is_bounded(port: int, endless: bytes, path: bytes) -> None:
    """Also of a request that is answered already."""
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        yield CHUNKED.replace(b"/v1/completions", path).replace(b"connection: close\r\n", b"")
        yield ONE_CHUNK + (b"1;" if endless == b";a=b" else b"0\r\nx: ")
        for _ in range(256):
            sent += 1 << 16
            yield (endless * (1 << 16))[: 1 << 16]

    received = reply(port, parts())
    assert len(statuses(received)) <= 1, "a connection that is reset may lose it"
    assert sent < 256 << 16, f"the connection ends soon after {FRAMING_BYTES_MAX} bytes"


@pytest.mark.parametrize(("nbytes", "size", "status"), [(200, 1, 200), (200_000, 64, 200), (200_000, 1, 400)])
def test_a_body_in_small_chunks_is_one_unless_there_are_many(port: int, nbytes: int, size: int, status: int) -> None:
    body = BODY.ljust(nbytes)
    parts = [body[at : at + size] for at in range(0, nbytes, size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    assert reply(port, [CHUNKED, chunks, b"0\r\n\r\n"]).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
def test_all_of_a_body_has_to_be_there_in_time(path: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though pieces of it keep coming, and also where it was answered before it ended."""
    monkeypatch.setattr(Protocol, "patience_s", 0.2)
    monkeypatch.setattr(Protocol, "body_s", 0.5)
    monkeypatch.setattr(Protocol, "answered_s", 0.2)
    with serving(market()) as url, socket.socket() as client:
        client.settimeout(0.02)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(post(body=b" " * 10_000).replace(b"/v1/completions", path)[:-10_000])
        received = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(int(WAIT_S / 0.02)):
                client.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    if not (part := client.recv(1 << 16)):
                        break
                    received += part
            else:
                pytest.fail("the connection does not end")
    assert received.startswith(b"HTTP/1.1 404 " if path == b"/nowhere" else b"HTTP/1.1 408 ")


def test_what_is_no_request_does_not_get_into_a_reply_under_way(port: int) -> None:
    received = reply(port, [post() + b"\x16\x03\x01 hello\r\n\r\n"])
    assert statuses(received) == [200]
    head, _, body = received.partition(b"\r\n\r\n")
    assert json.loads(body)["object"] == "text_completion", head


def test_a_head_behind_a_large_body_is_not_taken_for_a_large_head(port: int) -> None:
    body = BODY + b" " * 200_000
    received = reply(port, [post(body=body) + INNER[:20], INNER[20:].replace(b"host", b"connection: close\r\nhost")])
    assert statuses(received) == [200, 200]


CLOSING = INNER.replace(b"host", b"connection: close\r\nhost")


MANY_HEADERS = INNER.replace(b"host", b"a:\r\n" * 120 + b"host")


@pytest.mark.parametrize("each", [post(), INNER, MANY_HEADERS, post(body=BODY.ljust(9000))], ids=len)
def test_all_that_wait_on_a_connection_are_answered_in_their_turn(port: int, each: bytes) -> None:
    assert statuses(reply(port, [each * 300, CLOSING])) == [200] * 301


def test_what_waits_on_a_connection_is_neither_parsed_nor_taken_without_bound() -> None:
    together = Connections()
    behind = market(lambda *_: [Delta(tokens("a")), asyncio.Event().wait()])
    with serving(behind, together=together) as url, connected(port_of(url), post(body=STREAM)) as (client,):
        client.settimeout(0.2)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while True:
                sent += client.send(INNER * 1000)
        assert sent > 1 << 20, "the system takes some for the server"
        assert together.unfinished.nbytes < 1 << 20
        assert len(behind.handles) == 1


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
def test_to_http_1_0_a_body_is_told_without_chunks(port: int, body: bytes) -> None:
    received = reply(port, [post(body=body, version=b"1.0")])
    head, _, content = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    if body == BODY:
        assert json.loads(content)["object"] == "text_completion"
    else:
        assert content.startswith(b"data: {") and content.endswith(b"data: [DONE]\n\n")


def test_a_client_is_told_to_go_on_where_it_understands_that(port: int) -> None:
    expecting = [b"expect: 100-continue", b"connection: close"]
    assert statuses(reply(port, [post(*expecting)])) == [100, 200]
    assert statuses(reply(port, [post(*expecting, version=b"1.0")])) == [200]


def test_a_head_has_so_many_headers(port: int) -> None:
    """Bounded in number, too: the smallest take 30 times their bytes."""
    closing = b"connection: close\r\n"
    some = INNER.replace(b"host", closing + b"a:\r\n" * (HEADERS_MAX - 2) + b"host")
    assert statuses(reply(port, [some])) == [200]
    received = reply(port, [INNER.replace(b"host", b"a:\r\n" * HEADERS_MAX + b"host")])
    assert statuses(received) == [431] and b"connection: close" in received
    assert statuses(reply(port, [INNER[:-2] + b"a:\r\n" * 16_000])) == [431], "before all of it is there"


def test_an_url_that_cannot_be_read_is_refused_and_the_request_before_it_is_answered(port: int) -> None:
    bad = INNER.replace(b"/v1/models", b"http://a:99999999/")
    assert statuses(reply(port, [bad])) == [400]
    assert statuses(reply(port, [INNER + bad])) == [200]
    assert statuses(reply(port, [post() + bad])) == [200]
    with connected(port, INNER) as (client,):
        assert status(client) == 200
        client.sendall(bad)
        assert status(client) == 400


def test_unfinished_heads_are_bounded_together() -> None:
    """Those that take most are refused, and honest ones beside are not."""
    large, slow = INNER[:-2] + b"x: " + b"a" * 30_000, post()
    with (
        serving(market(says("ab")), together=Connections(unfinished_bytes_max=100_000)) as url,
        connected(port_of(url), slow[:40], slow[:-5], *[large] * 10) as (head, body, *others),
    ):
        assert [status(client) for client in others[:3]] == [503] * 3
        for client, rest in ((head, slow[40:]), (body, slow[-5:])):
            client.sendall(rest)
            assert status(client) == 200


def test_too_many_connections_end_the_one_that_has_waited_longest() -> None:
    with (
        serving(market(says("ab")), together=Connections(open_max=4)) as url,
        connected(port_of(url), post()[:-5], b"", INNER[:20]) as (body, silent, head),
        connected(port_of(url), INNER) as (kept,),
    ):
        assert status(kept) == 200
        with connected(port_of(url), INNER, INNER, INNER) as newer:
            assert (status(body), silent.recv(1), status(head)) == (503, b"", 503)
            assert [status(client) for client in newer] == [200] * 3
            kept.sendall(INNER)
            assert status(kept) == 200


def test_answers_that_nobody_reads_are_bounded_together() -> None:
    """Those of which most is unread end, and who reads goes on."""
    page = INNER.replace(b"/v1/models", b"/openapi.json")
    together = Connections(unread_bytes_max=64 << 10)
    with (
        serving(market(), together=together) as url,
        connected(port_of(url), *[page * 60] * 4, size_bytes=1),
        connected(port_of(url), INNER) as (reads,),
    ):
        assert status(reads) == 200
        _until(lambda: len(together.open) <= 3, "some are cut")
        assert together.unread.nbytes <= 64 << 10
        reads.sendall(INNER)
        assert status(reads) == 200


def test_requests_that_wait_are_bounded_together() -> None:
    """Those that hold most lose them; the requests before them go on."""
    together = Connections(unfinished_bytes_max=100_000)
    behind = market(lambda *_: [Delta(tokens("a")), asyncio.Event().wait()])
    sent = [post(body=STREAM) + INNER * count for count in (1000, 700, *[300] * 6)]
    with serving(behind, together=together) as url, connected(port_of(url), *sent):
        _until(lambda: len(behind.handles) == 8 and together.unfinished.nbytes > 20_000, "all have come")
        assert together.unfinished.nbytes <= 100_000
        assert not any(handle.cancelled for handle in behind.handles)


def test_one_who_leaves_is_missed_though_requests_wait_behind_the_one_that_runs() -> None:
    behind = market(lambda *_: [Delta(tokens("a")), asyncio.Event().wait()])
    with serving(behind) as url:
        with connected(port_of(url), post(body=STREAM) + INNER * 5):
            _until(lambda: bool(behind.handles), "it is answered")
        _until(lambda: behind.handles[0].cancelled, "it is cancelled")


PAGE = b"GET /openapi.json HTTP/1.%d\r\nhost: x\r\nconnection: %s\r\n\r\n"


@pytest.mark.parametrize("behind", [INNER, INNER.replace(b"1.1", b"1.0"), b"x" * 100_000])
def test_nothing_is_kept_of_what_came_behind_the_last_answer_of_a_connection(
    monkeypatch: pytest.MonkeyPatch, behind: bytes
) -> None:
    """Though that is not read, and its connection ends in time, or for others."""
    monkeypatch.setattr(Protocol, "patience_s", 0.2)
    lost, losing = list[Protocol](), Protocol.connection_lost

    def connection_lost(protocol: Protocol, error: Exception | None) -> None:
        losing(protocol, error)
        lost.append(protocol)

    monkeypatch.setattr(Protocol, "connection_lost", connection_lost)
    together = Connections()
    sent = [page + behind for page in (PAGE % (1, b"close"), PAGE % (0, b"keep-alive"))]
    with serving(market(), together=together) as url, connected(port_of(url), *sent, size_bytes=1):
        _until(lambda: len(lost) == 2, "both are cut")
        assert len(together.open) == together.unfinished.nbytes == together.unread.nbytes == 0


def test_one_that_ends_its_side_is_answered_where_the_answer_is_there_at_once(port: int) -> None:
    with connected(port, INNER.replace(b"/v1/models", b"/health")) as (client,):
        client.shutdown(socket.SHUT_WR)
        assert status(client) == 200


def test_a_connection_on_which_nothing_but_line_ends_came_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Protocol, "timeout_keep_alive", property(lambda _: 0.2, lambda *_: None), raising=False)
    with serving(market(says("ab"))) as url, connected(port_of(url), post() + b"\r\n" * 400) as (client,):
        assert status(client) == 200
        assert client.recv(1) == b""


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.01)
