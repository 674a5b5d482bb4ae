"""HTTP/1.1 as uvicorn speaks it, with what it lacks: bounds on heads, on framing and on waiting for the rest of a
request, one reply to one request whatever its framing says, errors in our form, a connection cut at once, or where
nobody reads what is left of an answer.

Who sits before this server may read a request in another way than the parser here. So what is not clear is refused
(RFC 9112, 6.1 and 11.2), and after a refusal nothing more of the connection is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from aegis.core.errors import UserError
from proxy.http.errors import error_body
from proxy.http.replies import encode
from proxy.http.request.request_ids import HEADER, new_id

HEAD_BYTES_MAX = 64 << 10
FRAMING_BYTES_MAX = 64 << 10
"""Of a body: chunk extensions, trailers, and what the sizes of its chunks take beyond `_CHUNK_BYTES` each."""

PATIENCE_S = 60.0
BODY_S = 300.0
ANSWERED_S = 30.0
PIPELINED_MAX = 64
CHUNKS_MAX = 4096
"""Of a body, that are parsed without giving others their turn."""
_CUT = "aegis.cut"
_BROKEN_OFF = "aegis.broken-off"
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_BETWEEN_FIELDS = len(": \r\n")
_CHUNK_BYTES = len("ffffffff\r\n\r\n")


def cut(scope: Scope) -> None:
    """Ends the connection without waiting for who does not read."""
    aborts: dict[str, Callable[[], None]] = scope.get("extensions", {})
    if _CUT in aborts:
        aborts[_CUT]()


def broken_off(scope: Scope) -> UserError | None:
    """Why the rest of the request's body is not waited for any more; what is there of it ends as if it were whole."""
    error: UserError | None = scope.get("extensions", {}).get(_BROKEN_OFF)
    return error


class Protocol(HttpToolsProtocol):
    """One connection."""

    patience_s = PATIENCE_S  # for a head, and between two pieces of a body
    body_s = BODY_S  # for all of a body
    answered_s = ANSWERED_S  # for what is left of one that was answered already
    _awaits_request = True  # the rest of one, or all of the first
    _in_head = False
    _head_bytes = 0  # of what is complete, and
    _unread_bytes = 0  # of all that came, while the head is not
    _requests = 0
    _body_bytes = 0  # in what is being parsed, its chunks' sizes included
    _chunks = 0  # in what is being parsed
    _framing_bytes = 0  # of this body
    _heard_s = 0.0
    _body_until_s = inf
    _broke_off = False
    _is_deaf = False  # nothing of what still comes is parsed
    _unsent_bytes = 0  # when it was looked at
    _taken_s = 0.0  # when there were less, or more
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard_s = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._patience:
            self._patience.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        requests, self._body_bytes, self._chunks = self._requests, 0, 0
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(error.__context__ if isinstance(error.__context__, UserError) else _no_request())
            return
        if self._in_head:
            self._unread_bytes += max(len(data) - self._body_bytes, 0)  # a body may come before it
            if self._unread_bytes > HEAD_BYTES_MAX:
                self._refuse(_head_too_large())
            return
        self._heard_s = self.loop.time()
        if self._chunks > CHUNKS_MAX and not self.flow.read_paused:
            self._yield()
        if self._requests == requests:  # all of it is of one body, or behind it
            self._framing_bytes += max(len(data) - self._body_bytes, 0)
            if self._framing_bytes > FRAMING_BYTES_MAX:
                self._refuse(_framing_too_large())

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])

    def _decline_upgrade(self, rest: bytes) -> None:
        """Reads the request as if no other protocol had been asked for, which any server may do (RFC 9110, 7.8). The
        parser takes no body where one was, and what follows the head for the next request: another one gets the head
        anew, without the question."""
        head = [self._method, b" ", self.url, b" HTTP/", self._version, b"\r\n"]
        for name, value in _without_upgrade(self.headers):
            head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._parse(b"".join([*head, b"\r\n", rest]))

    @property
    def _method(self) -> bytes:
        method: bytes = self.parser.get_method()
        return method

    @property
    def _version(self) -> bytes:
        version: str = self.parser.get_http_version()
        return version.encode()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._requests += 1
        self._awaits_request = self._in_head = True
        self._head_bytes = self._unread_bytes = self._framing_bytes = 0
        self._heard_s, self._body_until_s = self.loop.time(), inf
        self.scope["extensions"] = {_CUT: self.transport.abort}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: nobody here wants one, and none may pass for a header
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + _BETWEEN_FIELDS

    def on_headers_complete(self) -> None:
        """What it raises stops the parser, and is what `data_received` refuses the request with."""
        if self._head_bytes > HEAD_BYTES_MAX:
            raise _head_too_large()
        if len(self.pipeline) >= PIPELINED_MAX:
            raise UserError(f"more than {PIPELINED_MAX} requests wait for an answer on this connection")
        _refuse_unclear(self._method, self._version, self.headers)
        if self.parser.should_upgrade():
            return
        self._in_head = False
        self._body_until_s = self.loop.time() + self.body_s
        super().on_headers_complete()
        if self._version == b"1.0":
            _without_chunks(self.cycle)

    def _yield(self) -> None:
        """Others have their turn before more of so many chunks is parsed. Of what was answered already no more is."""
        if self.cycle.response_complete and self._awaits_request:
            self.transport.close()
        else:
            self.flow.pause_reading()
            self.loop.call_soon(self.flow.resume_reading)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        self._body_bytes += _CHUNK_BYTES

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._awaits_request = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._awaits_request and not self._in_head:  # the reply is not to be lost to a connection that is reset
            self._body_until_s = min(self._body_until_s, self.loop.time() + self.answered_s)
            if self._patience:
                self._patience.cancel()
            self._watch()

    def _watch(self) -> None:
        """One timer for a connection: it looks again when patience would end, if nothing were to come."""
        if self._is_left_unread():
            self.transport.abort()
            return
        left_s = min(self._heard_s + self.patience_s, self._body_until_s) - self.loop.time()
        behind_another = self._in_head and self.cycle is not None and not self.cycle.response_complete
        waits = self._awaits_request and not self.flow.read_paused and not behind_another
        if not waits or left_s > 0:
            self._patience = self.loop.call_later(left_s if waits else self.patience_s, self._watch)
        elif self.scope is None:
            self.transport.close()
        elif self._in_head:
            self._refuse(self._late())
        elif self.cycle.response_started or self._broke_off:
            self.transport.close()
        else:
            self._break_off(self._late())
            self._body_until_s = inf
            self._patience = self.loop.call_later(self.patience_s, self._watch)

    def _is_left_unread(self) -> bool:
        """Whether nothing was taken for so long of what remains of an answer that is made: it could be all of it, and
        nobody else looks. `KeepAlive` does at a stream that is under way."""
        unsent_bytes, now_s = self.transport.get_write_buffer_size(), self.loop.time()
        made = self.cycle is None or self.cycle.response_complete
        if not unsent_bytes or unsent_bytes != self._unsent_bytes or not made:
            self._unsent_bytes, self._taken_s = unsent_bytes, now_s
        return now_s - self._taken_s >= self.patience_s

    def _late(self) -> UserError:
        within_s = self.patience_s if self.loop.time() < self._body_until_s else self.body_s
        message = f"the rest of the request did not come within {within_s:g} s"
        return UserError(message, status=408, code="request_timeout")

    def _break_off(self, error: UserError) -> None:
        """Who reads the body answers with the error, like with any other: under the request's id, logged and counted.
        The connection ends with that."""
        cycle, self._broke_off = self.cycle, True
        cycle.scope["extensions"][_BROKEN_OFF] = error  # type: ignore[assignment]
        cycle.keep_alive = cycle.more_body = False
        cycle.message_event.set()

    def _refuse(self, error: UserError) -> None:
        """The last that is answered on this connection. A reply that is under way is finished first, and nothing is
        written into it."""
        if self.transport.is_closing():
            return
        self._is_deaf = True
        cycle = self.cycle
        has_cycle = cycle is not None and self._awaits_request and not self._in_head  # the request at fault
        if cycle is None or (cycle.response_complete and not has_cycle):
            self._reply(error)
        elif cycle.response_complete:
            self.transport.close()
        elif cycle.response_started or not has_cycle:
            cycle.keep_alive = False
        else:
            self._break_off(error)

    def _reply(self, error: UserError) -> None:
        body = encode(error_body(error))
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (error.status, _REASONS[error.status])
        head += b"%s: %s\r\n" % (HEADER, new_id().encode())
        self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        self.transport.close()


def _without_upgrade(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")
        if name != b"upgrade":
            yield name, value


def _refuse_unclear(method: bytes, version: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises UserError where another server might take the request for another one, or for two."""
    if version not in (b"1.0", b"1.1"):
        raise _no_request()
    if method == b"CONNECT":
        raise UserError("this is no proxy: CONNECT is not served", code="invalid_http")
    hosts, codings = 0, list[bytes]()
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if hosts > 1 or (not hosts and version == b"1.1"):
        raise UserError(f"a request has one Host header, not {hosts}", code="invalid_http")
    if codings and (codings != [b"chunked"] or version == b"1.0"):
        raise UserError("the one Transfer-Encoding is chunked, of HTTP/1.1", code="invalid_http")


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """A client of HTTP/1.0 knows no chunks: a body whose length is not told ends with the connection."""
    send, told = cycle.send, False

    async def send_plain(message: Any) -> None:
        nonlocal told
        if message["type"] == "http.response.start":
            told = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if told else False
        elif not told:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def _no_request() -> UserError:
    return UserError("this is no HTTP/1.1 request", code="invalid_http")


def _head_too_large() -> UserError:
    return UserError(f"the head is larger than {HEAD_BYTES_MAX} bytes", status=431)


def _framing_too_large() -> UserError:
    message = f"chunk extensions and trailers take more than {FRAMING_BYTES_MAX} bytes"
    return UserError(message, code="invalid_http")
