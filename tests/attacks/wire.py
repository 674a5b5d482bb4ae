"""Raw connections: bytes are sent as they are, and what comes back is parsed by a strict reader of responses."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

WAIT_S = 20.0
SILENCE_S = 0.4
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2}) [ -~]*")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*?)[ \t]*")
_SIZE = re.compile(rb"[0-9a-fA-F]{1,8}")


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    minor: int
    """Of HTTP/1.x."""


@dataclass(slots=True)
class Heard:
    """All that came on a connection. `rest` is what is no response, or not all of one."""

    responses: list[Response] = field(default_factory=list)
    interim: list[int] = field(default_factory=list)
    rest: bytes = b""
    closed: bool = False

    @property
    def statuses(self) -> list[int]:
        return [response.status for response in self.responses]


class Wire:
    """A connection to a server, or to what stands before it."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.host = address.netloc.encode()
        self.socket = socket.create_connection((address.hostname, address.port), WAIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *pieces: bytes, pause_s: float = 0.0) -> bool:
        """Piece by piece; whether the other side took them all."""
        try:
            for number, piece in enumerate(pieces):
                if number and pause_s:
                    time.sleep(pause_s)
                self.socket.sendall(piece)
        except OSError:
            return False
        return True

    def hear(
        self, *, count: int = 0, methods: Sequence[bytes] = (), silence_s: float = SILENCE_S, within_s: float = WAIT_S
    ) -> Heard:
        """All that comes until it is closed, or nothing came for `silence_s` after the first `count` responses."""
        came, closed, deadline_s = b"", False, time.monotonic() + within_s
        while not closed and time.monotonic() < deadline_s:
            enough = len(parsed(came, methods).responses) >= count
            self.socket.settimeout(silence_s if enough else max(deadline_s - time.monotonic(), 0.001))
            try:
                piece = self.socket.recv(1 << 16)
            except TimeoutError:
                break
            except OSError:
                piece = b""
            came += piece
            closed = not piece
        heard = parsed(came, methods, closed=closed)
        heard.closed = closed
        return heard


def parsed(came: bytes, methods: Sequence[bytes] = (), *, closed: bool = False) -> Heard:
    """`methods` are those of the requests that are answered, in their order, where they are not all of those whose
    answers have bodies."""
    heard = Heard(rest=came)
    while found := _one(
        heard.rest, methods[len(heard.responses)] if len(methods) > len(heard.responses) else b"", closed
    ):
        response, heard.rest = found
        if response.status < 200:
            heard.interim.append(response.status)
        else:
            heard.responses.append(response)
    return heard


def _one(came: bytes, method: bytes, closed: bool) -> tuple[Response, bytes] | None:
    head, found, rest = came.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    status = _STATUS.fullmatch(lines[0])
    if not found or not status:
        return None
    headers: dict[bytes, bytes] = {}
    for line in lines[1:]:
        pair = _FIELD.fullmatch(line)
        if not pair:
            return None
        headers[pair[1].lower()] = pair[2]
    number = int(status[2])
    if method == b"HEAD" or number < 200 or number in (204, 304):
        body: tuple[bytes, bytes] | None = (b"", rest)
    else:
        body = _body(headers, rest, closed)
    return (Response(number, headers, body[0], int(status[1])), body[1]) if body else None


def _body(headers: dict[bytes, bytes], rest: bytes, closed: bool) -> tuple[bytes, bytes] | None:
    if b"transfer-encoding" in headers:
        return (
            _chunks(rest) if headers[b"transfer-encoding"] == b"chunked" and b"content-length" not in headers else None
        )
    if b"content-length" in headers:
        length = int(headers[b"content-length"])
        return (rest[:length], rest[length:]) if len(rest) >= length else None
    return (rest, b"") if closed else None


def _chunks(rest: bytes) -> tuple[bytes, bytes] | None:
    body = b""
    while True:
        line, found, rest = rest.partition(b"\r\n")
        if not found or not _SIZE.fullmatch(line):
            return None
        size = int(line, 16)
        if rest[size : size + 2] != b"\r\n":
            return None
        body, rest = body + rest[:size], rest[size + 2 :]
        if not size:
            return body, rest


def request(
    path: str, body: bytes | None = None, *headers: bytes, method: bytes = b"", version: bytes = b"HTTP/1.1"
) -> bytes:
    """An honest one; a body has its Content-Length."""
    lines = [
        b"%s %s %s" % (method or (b"GET" if body is None else b"POST"), path.encode(), version),
        b"Host: localhost",
    ]
    if body is not None:
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*lines, *headers, b"", body or b""])
