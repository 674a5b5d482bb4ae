"""One request is answered once, whatever its framing says and whoever stands before the server; what hides in a body is
no request. What cannot be told for sure is refused, and its connection ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from zlib import crc32

import pytest

from tests.attacks import fronts
from tests.attacks.wire import Heard, Wire
from tests.live.server import Server, eventually

AT_ONCE = 24
LATER_S = 0.2
PATH = b"/smuggled-........"
INNER = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % PATH
MAIN = b"/v1/completions"
ASKED = json.dumps({"model": "llama", "prompt": [5, 6], "max_tokens": 2, "temperature": 0}).encode()
OK = (200,)
REFUSED = (400, 405, 408, 411, 413, 414, 417, 426, 431, 501, 505)


@dataclass(frozen=True, slots=True)
class Shape:
    """What is sent, piece by piece. `INNER` in it is a request for a path of its own, which nobody asked for. `direct`
    are the statuses that the server may answer each request in it with; `ends`: it closes the connection then.
    `fronted`: it is sent through fronts as well. `in_turn`: a piece is sent when that before it is answered, not after
    a pause."""

    name: str
    pieces: tuple[bytes, ...]
    direct: tuple[tuple[int, ...], ...] = (REFUSED,)
    ends: bool = True
    fronted: bool = True
    methods: tuple[bytes, ...] = ()
    in_turn: bool = False

    @property
    def marker(self) -> str:
        return f"/smuggled-{crc32(self.name.encode()):08x}"

    def sent(self) -> list[bytes]:
        return [piece.replace(PATH, self.marker.encode()) for piece in self.pieces]


def head(*lines: bytes, first: bytes = b"POST %s HTTP/1.1" % MAIN, host: bytes = b"Host: localhost") -> bytes:
    typed = [b"Content-Type: application/json"] if first.startswith(b"POST") else []
    return b"\r\n".join([first, *([host] if host else []), *typed, *lines, b"", b""])


def chunks(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + end


TE = b"Transfer-Encoding: chunked"
LENGTH, INNER_LENGTH = b"Content-Length: %d" % len(ASKED), b"Content-Length: %d" % len(INNER)
HEALTH = b"GET /health HTTP/1.1"
UPGRADES = (b"Connection: Upgrade", b"Upgrade: h2c")
WEBSOCKET = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")
WEBSOCKET += (b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",)
H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA")
ENDED = b"0\r\n\r\n"


def refused(name: str, *pieces: bytes) -> Shape:
    return Shape(name, pieces)


def answered(name: str, *pieces: bytes, count: int = 1, methods: tuple[bytes, ...] = ()) -> Shape:
    return Shape(name, pieces, (OK,) * count, ends=False, methods=methods)


def either(name: str, *pieces: bytes, ends: bool = False) -> Shape:
    """Answered as the honest request that it also is, or refused."""
    return Shape(name, pieces, ((*OK, 401, 404, 405, *REFUSED),), ends=ends)


def doubtful() -> Iterator[Shape]:
    """Two lengths, or none that all read alike."""
    yield refused("CL.TE", head(b"Content-Length: 5", TE) + ENDED + INNER)
    yield refused("CL.TE, the whole as the length says", head(INNER_LENGTH, TE) + ENDED + INNER)
    yield refused("TE.CL", head(TE, b"Content-Length: 3") + b"8\r\nSMUGGLED\r\n" + ENDED + INNER)
    for coding in (
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: identity, chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked, chunked",
        b"Transfer-Encoding:\x0bchunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding\t: chunked",
        b'Transfer-Encoding: "chunked"',
        b"Transfer-Encoding: chunked;q=1",
        b"Transfer-Encoding: chu\0nked",
        b"Transfer-Encoding:\r\n chunked",
        b"Transfer-Encoding: chunked\r\n , identity",
        b"Transfer_Encoding: chunked\r\nTransfer-Encoding: x",
    ):
        shown = coding.decode().replace("\r\n", " / ").replace("Transfer-Encoding", "TE")
        yield refused(f"TE.TE {shown!r}", head(coding) + ENDED + INNER)
        yield refused(f"CL and TE.TE {shown!r}", head(INNER_LENGTH, coding) + ENDED + INNER)
    for length in (b"+5", b"5, 5", b"5, 6", b"-5", b"0x5", b"5 5", b"5;", b"1e1", b"99999999999999999999", b"\xb2"):
        yield refused(f"Content-Length: {length!r}", head(b"Content-Length: " + length) + b"12345" + INNER)
    yield refused("differing lengths", head(b"Content-Length: 5", b"Content-Length: 6") + b"12345" + INNER)
    yield refused("doubled lengths", head(LENGTH, LENGTH) + ASKED)
    yield refused("a length with a space before the colon", head(b"Content-Length : 5") + b"12345" + INNER)
    yield either("no length at all", head())


def chunked() -> Iterator[Shape]:
    yield answered("chunks", head(TE) + chunks(ASKED[:7], ASKED[7:]))
    yield answered("chunked in capitals", head(b"TRANSFER-ENCODING: CHUNKED") + chunks(ASKED))
    yield answered("trailers", head(TE, b"Trailer: X-Sum") + chunks(ASKED, end=b"0\r\nX-Sum: 5\r\nX-More: 6\r\n\r\n"))
    length = b"0\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    yield either("trailers that are lengths", head(TE) + chunks(ASKED, end=length))
    yield answered("chunk extensions", head(TE) + b"%x;name=value;other\r\n%s\r\n0;last\r\n\r\n" % (len(ASKED), ASKED))
    yield answered("leading zeros", head(TE) + b"000%x\r\n%s\r\n000\r\n\r\n" % (len(ASKED), ASKED))
    for name, body in (
        ("a size beyond 64 bits", b"FFFFFFFFFFFFFFFFF\r\nabc\r\n"),
        ("a size that wraps around", b"10000000000000003\r\nabc\r\n"),
        ("a negative size", b"-3\r\nabc\r\n"),
        ("a signed size", b"+3\r\nabc\r\n"),
        ("a size with 0x", b"0x3\r\nabc\r\n"),
        ("a size with an underscore", b"1_0\r\n0123456789abcdef\r\n"),
        ("a size of nothing", b"\r\nabc\r\n"),
        ("a size behind a space", b" 3\r\nabc\r\n"),
        ("data longer than its size", b"3\r\nabcdef\r\n"),
        ("data that ends with LF", b"3\r\nabc\n"),
        ("a bare CR behind the size", b"3\rabc\r\n"),
        ("a bare LF behind the size", b"3\nabc\r\n"),
        ("a bare LF in an extension", b"3;a\nabc\r\n"),
        ("NUL in an extension", b"3;\0\r\nabc\r\n"),
    ):
        yield refused(name, head(TE) + body + ENDED + INNER)
    yield refused("a bare LF at the end of chunks", head(TE) + chunks(ASKED, end=b"0\n\n") + INNER)
    yield Shape("HTTP/1.0 with chunks", (head(TE, first=b"POST %s HTTP/1.0" % MAIN) + ENDED + INNER,))


def upgrades() -> Iterator[Shape]:
    """Nobody is upgraded, so a body is a body."""
    for name, lines in (("h2c", UPGRADES), ("settings of h2c", H2C), ("websocket", WEBSOCKET)):
        yield either(f"{name}, a request for a body at once", head(INNER_LENGTH, *lines) + INNER)
        yield either(f"{name}, a request for a body later", head(INNER_LENGTH, *lines), INNER)
        yield either(f"{name}, a request in chunks", head(TE, *lines) + chunks(INNER))
        yield answered(f"{name}, an honest body", head(LENGTH, *lines) + ASKED)
        yield answered(f"{name}, an honest body later", head(LENGTH, *lines), ASKED)
        yield answered(f"{name}, an honest body in pieces", head(LENGTH, *lines), ASKED[:9], ASKED[9:])
        yield answered(f"{name}, honest chunks", head(TE, *lines) + chunks(ASKED))
        yield answered(f"{name}, honest chunks later", head(TE, *lines), chunks(ASKED[:5], end=b""), chunks(ASKED[5:]))
        yield answered(f"GET for {name}", head(*lines, first=HEALTH))
        yield refused(f"{name}, CL and TE", head(b"Content-Length: 5", TE, *lines) + ENDED + INNER)
        yield refused(f"{name}, TE.TE", head(b"Transfer-Encoding: x", *lines) + ENDED + INNER)
    for target in (b"localhost:80", b"/"):
        line = b"CONNECT %s HTTP/1.1" % target
        yield refused(f"CONNECT {target.decode()}", head(first=line) + INNER)
        yield refused(f"CONNECT {target.decode()} with a body", head(INNER_LENGTH, first=line), INNER)
    yield Shape("HTTP/2 as if agreed", (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",), fronted=False)


def odd_heads() -> Iterator[Shape]:
    yield refused("obs-fold in a value", head(b"X-A: b\r\n c", LENGTH) + ASKED)
    yield refused("obs-fold in a length", head(b"Content-Length:\r\n 5") + b"12345" + INNER)
    yield refused("obs-fold before the first field", HEALTH + b"\r\n X: y\r\nHost: localhost\r\n\r\n")
    yield refused("bare LF line ends", b"GET /health HTTP/1.1\nHost: localhost\n\n")
    yield refused("bare LF in a head", b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n")
    yield refused("bare LF at the end of a head", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\n")
    yield refused("bare CR in a value", head(b"X-A: b\rContent-Length: 5", first=HEALTH))
    yield refused("bare CR line ends", b"GET /health HTTP/1.1\rHost: localhost\r\r")
    yield refused("NUL in a name", head(b"X\0A: b", first=HEALTH))
    yield refused("NUL in a value", head(b"X-A: b\0c", first=HEALTH))
    yield refused("NUL in a path", head(first=b"GET /hea\0lth HTTP/1.1"))
    yield refused("a space in a name", head(b"X A: b", first=HEALTH))
    yield refused("no colon", head(b"X-A", first=HEALTH))
    yield refused("no name", head(b": b", first=HEALTH))
    yield answered("leading CRLF", b"\r\n" + head(first=HEALTH))
    yield answered("an absolute URL", head(first=b"GET http://localhost/health HTTP/1.1"))
    yield either("an absolute URL of another host", head(first=b"GET http://elsewhere/health HTTP/1.1"))
    yield refused("a port that is none", head(first=b"GET http://a:99999999/ HTTP/1.1"))
    yield refused("a doubled Host", head(b"Host: elsewhere", first=HEALTH))
    yield refused("the same Host twice", head(b"Host: localhost", first=HEALTH))
    yield refused("no Host", head(first=HEALTH, host=b""))
    yield refused("HTTP/1.2", head(first=b"GET /health HTTP/1.2"))
    yield refused("HTTP/2.0", head(first=b"GET /health HTTP/2.0"))
    yield refused("HTTP/01.1", head(first=b"GET /health HTTP/01.1"))
    yield refused("http/1.1", head(first=b"GET /health http/1.1"))
    yield Shape("HTTP/0.9", (b"GET /health\r\n\r\n",), fronted=False)
    yield Shape("two spaces", (head(first=b"GET  /health HTTP/1.1"),), ((*OK, *REFUSED),), ends=False)
    yield refused("a space in a path", head(first=b"GET /hea lth HTTP/1.1"))
    yield refused("an unknown method", head(first=b"SMUGGLE /health HTTP/1.1"))
    yield Shape("TRACE", (head(first=b"TRACE /health HTTP/1.1"),), ((404, 405, 400, 501),), ends=False)


def honest() -> Iterator[Shape]:
    first, second = head(first=HEALTH), head(first=b"GET /version HTTP/1.1")
    yield answered("pipelined", first + second, count=2)
    yield answered("pipelined behind a body", head(LENGTH) + ASKED + second, count=2)
    yield answered("pipelined behind chunks", head(TE) + chunks(ASKED) + second, count=2)
    yield answered("pipelined behind an honest upgrade", head(LENGTH, *UPGRADES) + ASKED + second, count=2)
    yield answered("HEAD and GET", head(first=b"HEAD /health HTTP/1.1") + second, count=2, methods=(b"HEAD", b"GET"))
    bad = head(first=b"GET http://a:99999999/ HTTP/1.1")
    yield Shape("a port that is none behind a good one", (first + bad,), (OK,), fronted=False)
    yield Shape("a port that is none behind a good POST", (head(LENGTH) + ASKED + bad,), (OK,), fronted=False)
    yield Shape("a port that is none on a kept connection", (first, bad), (OK, REFUSED), in_turn=True)
    closing = head(b"Connection: close", first=HEALTH)
    yield Shape("a request behind the last", (closing + INNER,), (OK,))
    yield Shape("HTTP/1.0", (head(first=b"GET /health HTTP/1.0"),), (OK,))
    yield Shape("a request behind HTTP/1.0", (head(first=b"GET /health HTTP/1.0") + INNER,), (OK,))
    kept = head(b"Connection: keep-alive", first=b"GET /health HTTP/1.0")
    yield Shape("HTTP/1.0 that asks to be kept", (kept,), (OK,), ends=False)
    yield answered("Expect: 100-continue", head(LENGTH, b"Expect: 100-continue"), ASKED)
    yield answered("Expect: 100-continue and no wait", head(LENGTH, b"Expect: 100-continue") + ASKED)
    yield either("Expect: something else", head(LENGTH, b"Expect: 200-ok") + ASKED)


SHAPES = [*doubtful(), *chunked(), *upgrades(), *odd_heads(), *honest()]
NAMES = [shape.name for shape in SHAPES]


@dataclass(frozen=True, slots=True)
class Sent:
    """All shapes, sent through one front or straight to the server, and what was heard of each. `read` is every request
    that the front saw in them, `served` every one that the server did."""

    kind: str
    heard: dict[str, Heard]
    read: str
    served: str


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards() -> None:
    """`sent` looks once: the tests of hundreds of shapes ask nothing themselves."""


@pytest.fixture(scope="module", params=["direct", "nginx", "haproxy"])
def sent(request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sent]:
    """Some at a time, with honest requests beside that go over the connections which the front shares out."""
    kind: str = request.param
    with ExitStack() as stack:
        url, read, logged = server.url, str, len(server.output())
        if kind != "direct":
            front = stack.enter_context(fronts.running(kind, server.url, tmp_path_factory.mktemp(kind) / "front"))
            url, read = front.url, front.took
        shapes = [shape for shape in SHAPES if kind == "direct" or shape.fronted]
        with ThreadPoolExecutor(AT_ONCE + 1) as pool:
            sending = {shape.name: pool.submit(send, url, shape) for shape in shapes}
            victims = pool.submit(ask_honestly, url, lambda: all(each.done() for each in sending.values()))
            heard = {name: each.result() for name, each in sending.items()}
            assert victims.result() == []
        finish(url, kind, server)
        server.wait_for_freed_memory()
        yield Sent(kind, heard, read(), server.output()[logged:])


def send(url: str, shape: Shape) -> Heard:
    with Wire(url) as wire:
        pieces, before = shape.sent(), []
        while shape.in_turn and len(pieces) > 1:
            wire.send(pieces.pop(0))
            before += wire.hear(count=1, within_s=5).responses
        wire.send(*pieces, pause_s=LATER_S)
        heard = wire.hear(count=len(shape.direct) - len(before), methods=shape.methods, within_s=5)
        heard.responses[:0] = before
        return heard


def ask_honestly(url: str, is_over: Callable[[], bool]) -> list[str]:
    """The errors in answers to requests that differ from all others."""
    wrong, number = [], 0
    while not is_over() or number < 20:
        number += 1
        path = f"/honest-{number}"
        with Wire(url) as wire:
            wire.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())
            heard = wire.hear(count=1)
        if heard.statuses != [404] or path.encode() not in heard.responses[0].body:
            wrong.append(f"{path}: {heard}")
        time.sleep(0.005)  # beside, not instead
    return wrong


def finish(url: str, kind: str, server: Server) -> None:
    """The log has a line for each request that came before."""
    with Wire(url) as wire:
        wire.send(b"GET /last-of-%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % kind.encode())
        assert wire.hear(count=1).statuses == [404]
    eventually(lambda: f"path=/last-of-{kind}" in server.output(), "it is in the log")


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_one_request_has_one_response(sent: Sent, shape: Shape) -> None:
    if shape.name not in sent.heard:
        pytest.skip("it is about the server itself")
    heard = sent.heard[shape.name]
    assert not heard.rest and 101 not in heard.interim, heard
    if sent.kind == "direct":
        assert len(heard.responses) == len(shape.direct), heard
        for response, allowed in zip(heard.responses, shape.direct, strict=True):
            assert response.status in allowed, heard
        assert heard.closed or not shape.ends, heard
    else:
        read_as_two = f"GET {shape.marker}" in sent.read  # by the front, which answers both
        assert len(heard.responses) == len(shape.direct) + read_as_two, heard
        if shape.direct == (OK,) * len(shape.direct) and not read_as_two:
            assert heard.statuses == [200] * len(shape.direct), heard


def test_nothing_that_hid_in_a_request_was_taken_for_one(sent: Sent) -> None:
    """A front may read two requests where there was to be one: then it answers both, and nobody is deceived."""
    served = {shape.marker for shape in SHAPES if f"path={shape.marker} " in sent.served}
    assert {marker for marker in served if f"GET {marker}" not in sent.read} == set()
