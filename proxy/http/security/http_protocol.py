"""HTTP/1.1 as uvicorn speaks it, with what it lacks:

* bounds on heads, on framing, and on waiting for the rest of a request;
* bounds on what all connections hold together;
* one reply to one request, whatever its framing says;
* errors in our form;
* cutting a connection at once, or when nobody reads what is left of an answer.

Who sits before this server may read a request in another way than the parser here. So what is not clear is refused
(RFC 9112, 6.1 and 11.2), and after a refusal nothing more of the connection is parsed.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from aegis.core.errors import UserError
from proxy.http.errors import error_body
from proxy.http.replies import encode
from proxy.http.request_ids import HEADER, new_id
from proxy.http.security.open_connections import OpenConnections, connections_max
from proxy.http.security.paced_starts import PacedStarts
from proxy.http.security.shared_bound import SharedBound

HEAD_BYTES_MAX = 64 << 10
HEADERS_MAX = 128
HELD_BYTES_MAX = 64 << 10
"""Of what came behind a request that is not answered yet. With more, nothing more of the connection is taken."""

UNFINISHED_BYTES_MAX = 16 << 20
"""Of all connections: heads of requests that are not all there yet, and requests that wait for another's answer."""

UNREAD_BYTES_MAX = 16 << 20
"""Of all connections: answers that are made and wait for their readers, where it is more than `_UNREAD_BYTES`."""

FRAMING_BYTES_MAX = 64 << 10
"""Of a body: chunk extensions, trailers, and what the sizes of its chunks take beyond `_CHUNK_BYTES` each."""

PATIENCE_S = 60.0
BODY_S = 300.0
ANSWERED_S = 30.0
SMALL_CHUNKS_MAX = 256
"""Of a body whose chunks have less than `CHUNK_BYTES_LEAST` on average: each takes as long as a kilobyte to parse."""

CHUNK_BYTES_LEAST = 64
_AT_ONCE = frozenset({"/health", "/ready"})
"""Paths of requests that take next to nothing, and whose answers tell whether the server lives."""

_CUT = "aegis.cut"
_BROKEN_OFF = "aegis.broken-off"
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    503: b"Service Unavailable",
}
_TLS_HANDSHAKE = b"\x16\x03"
_REQUEST = re.compile(rb"([A-Za-z-]{1,32}) /\S* HTTP/1\.[01]\r?\n")
_BETWEEN_FIELDS = len(": \r\n")
_CHUNK_BYTES = len("ffffffff\r\n\r\n")
_HEADER_BYTES = 136  # that a header takes in memory beyond its name and value
_REQUEST_BYTES = 2600  # that a request takes beyond its head, where it waits
_UNREAD_BYTES = 16 << 10
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8  # of Linux's tcp_states.h
_TURN_BYTES = 16 << 10  # after so many at once others have their turn
_PIECE_BYTES = 512  # of all but bodies whose lengths are known: so few requests are parsed before their turn


def cut(scope: Scope) -> None:
    """Ends the connection without waiting for a client that does not read."""
    aborts: dict[str, Callable[[], None]] = scope.get("extensions", {})
    if _CUT in aborts:
        aborts[_CUT]()


def broken_off(scope: Scope) -> UserError | None:
    """The reason why the rest of the request's body is not waited for any more; the part that has come ends as if it
    were whole."""
    error: UserError | None = scope.get("extensions", {}).get(_BROKEN_OFF)
    return error


class Connections:
    """The bounds that the connections of one server share."""

    __slots__ = ("open", "starts", "unfinished", "unread")

    def __init__(
        self,
        *,
        open_max: int | None = None,
        unfinished_bytes_max: int = UNFINISHED_BYTES_MAX,
        unread_bytes_max: int = UNREAD_BYTES_MAX,
    ) -> None:
        """Without `open_max` as many may be open as this process has descriptors for."""
        self.open = OpenConnections[Protocol](open_max or connections_max(), Protocol.make_room)
        self.starts = PacedStarts()
        self.unfinished = SharedBound[Protocol](unfinished_bytes_max, Protocol.give_up)
        self.unread = SharedBound[Protocol](unread_bytes_max, Protocol.abort)


class Protocol(HttpToolsProtocol):
    """One connection."""

    patience_s = PATIENCE_S  # for a head, and between two pieces of a body
    body_s = BODY_S  # for all of a body
    answered_s = ANSWERED_S  # for what is left of one that was answered already
    _awaits_request = True  # the rest of one, or all of the first
    _in_head = False
    _head_bytes = 0  # of what is complete, and
    _unread_bytes = 0  # of all that came, while the head is not
    _headers = 0  # of this head
    _counts = False  # what it has of unfinished requests is more than nothing
    _running: RequestResponseCycle | None = None
    _requests = 0
    _body_bytes = 0  # in what is being parsed, its chunks' sizes included
    _chunks = 0  # of this body
    _content_bytes = 0  # of this body
    _body_left = 0  # of this body, where its length is told
    _framing_bytes = 0  # of this body
    _received_s = 0.0
    _body_until_s = inf
    _broke_off = False
    _ignores_input = False  # nothing of what still comes is parsed
    _unsent_bytes = 0  # when it was looked at
    _taken_s = 0.0  # when there were less, or more
    _patience: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, together: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._together = together
        self._held = b""  # what came behind a request that is not answered yet
        self._pipelined_bytes = 0  # of requests that were parsed before their turn, as they are in memory

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(_UNREAD_BYTES)
        self._received_s = self.loop.time()
        self._watch()
        self._together.open.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._running and self._running is not self.cycle:  # others wait behind it, and only the last one was told
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        self._held = b""
        self._together.open.closed(self)
        self._together.unfinished.hold(self, 0)
        self._together.unread.hold(self, 0)
        if self._patience:
            self._patience.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._ignores_input:
            self._read(self._held + data)
            self._count()
            self._keep_alive()
        if len(data) >= _TURN_BYTES and not self.flow.read_paused and not self.transport.is_closing():
            self._yield()

    def _yield(self) -> None:
        """Lets other connections have the loop: libuv reads one up to 32 times in a turn (its `uv__read`), which is
        8 MiB of what a client may send without end behind an answer that it already has."""
        self.transport.pause_reading()
        self.loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        """Parses up to the end of a request that is not answered yet. The rest is held as it came, because parsing it
        takes far more time and memory, and its client may leave before it is wanted."""
        self._unset_keepalive_if_required()
        self._held, at = b"", 0
        while at < len(data) and not self._ignores_input:
            if self._waits():
                self._held = data[at:]
                if len(self._held) > HELD_BYTES_MAX:
                    self.flow.pause_reading()
                return
            end = at + max(self._body_left, _PIECE_BYTES)
            self._read_piece(data[at:end])
            at = end

    def _waits(self) -> bool:
        """Whether what comes next is behind a request that is not answered yet."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return bool(self.pipeline) or self._in_head or not self._awaits_request

    def _read_piece(self, data: bytes) -> None:
        requests, self._body_bytes = self._requests, 0
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            reason = error.__context__ if isinstance(error.__context__, UserError) else _not_understood(data, error)
            self._refuse(reason.with_traceback(None))  # which holds what was read, and the request holds the reason
            return
        if self._in_head:
            self._unread_bytes += max(len(data) - self._body_bytes, 0)  # a body may come before it
            if self._unread_bytes > HEAD_BYTES_MAX:
                self._refuse(_head_too_large())
            return
        self._received_s = self.loop.time()
        if self._requests == requests:  # all of it is of one body, or behind it
            self._framing_bytes = max(self._framing_bytes + len(data) - self._body_bytes, 0)
            if self._framing_bytes > FRAMING_BYTES_MAX:
                self._refuse(_framing_too_large())

    def _count(self) -> None:
        """Counts the bytes of requests that are not complete, or wait."""
        nbytes = len(self._held) + self._pipelined_bytes
        if self._awaits_request and self._requests and not self._ignores_input:
            nbytes += max(self._head_bytes, self._unread_bytes) + self._headers * _HEADER_BYTES
        if nbytes or self._counts:
            self._counts = nbytes > 0
            self._together.unfinished.hold(self, nbytes)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])

    def _decline_upgrade(self, rest: bytes) -> None:
        """Reads the request as if no other protocol had been asked for, which any server may do (RFC 9110, 7.8). The
        parser expects no body after an upgrade and takes the bytes after the head for the next request, so a new parser
        gets the head again, without `Upgrade`."""
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
        self._head_bytes = self._unread_bytes = self._headers = 0
        self._framing_bytes = self._content_bytes = self._chunks = self._body_left = 0
        self._received_s, self._body_until_s = self.loop.time(), inf
        self.scope["extensions"] = {_CUT: self.transport.abort}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: none is used here, and none may pass for a header
        self._headers += 1
        if self._headers > HEADERS_MAX:
            raise UserError(f"the head has more than {HEADERS_MAX} headers", status=431)
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + _BETWEEN_FIELDS

    def on_headers_complete(self) -> None:
        """An error raised here stops the parser, and `_read` refuses the request with it."""
        if self._head_bytes > HEAD_BYTES_MAX:
            raise _head_too_large()
        _refuse_unclear(self._method, self._version, self.headers)
        if self.parser.should_upgrade():
            return
        self.expect_100_continue &= self._version == b"1.1"  # 1.0 knows no 100 (RFC 9110, 10.1.1)
        super().on_headers_complete()  # which raises where it cannot read the URL
        self._in_head = False
        self._body_left = _length(self.headers)
        self._body_until_s = self.loop.time() + self.body_s
        if self.pipeline:
            self._pipelined_bytes += self._head_bytes + self._headers * _HEADER_BYTES + _REQUEST_BYTES
            self.flow.resume_reading()  # or it would not be told that its client has left
        if self._version == b"1.0":
            _without_chunks(self.cycle)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        self._body_bytes += _CHUNK_BYTES
        if self._chunks > SMALL_CHUNKS_MAX and self._content_bytes < (self._chunks - 1) * CHUNK_BYTES_LEAST:
            raise _chunks_too_small()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._content_bytes += len(body)
        self._body_left -= len(body)
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._awaits_request = False
        if not self.cycle.response_complete:
            self._together.open.request_complete(self)
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        later = partial(self._start_later, cycle, app)
        if cycle.scope["path"] in _AT_ONCE or not self._together.starts.waits(self.loop, later):
            self._start(cycle, app)

    def _start_later(self, cycle: RequestResponseCycle, app: Any) -> bool:
        if self.transport.is_closing() or _has_left(self.transport):
            self.transport.close()  # behind what is left of the answer before
            return False
        self._start(cycle, app)
        return True

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle is self.cycle and not self._in_head:
            self._received_s = self.loop.time()
            self._body_until_s = self._received_s + self.body_s
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins the next one that is parsed
        if self.transport.is_closing():
            self._drop_waiting()
        left = self._awaits_request and not self._in_head
        if self.cycle.response_complete or left:
            self._together.open.answered(self)
        self._received_s = self.loop.time()
        if left and self.cycle.response_complete:  # the reply is not to be lost to a connection that is reset
            self._body_until_s = min(self._body_until_s, self.loop.time() + self.answered_s)
            if self._patience:
                self._patience.cancel()
            self._watch()
        if not self.pipeline:
            self._pipelined_bytes = 0
        if self._held:
            self._read(self._held)
        self._count()
        self._keep_alive()

    def _drop_waiting(self) -> None:
        """What came behind the request that is answered, or is about to be, is not answered on this connection."""
        self.pipeline.clear()
        self._held, self._pipelined_bytes = b"", 0
        self._ignores_input = True
        self._awaits_request = False
        self.cycle = self._running  # type: ignore[assignment]  # uvicorn's is no request before the first one either

    def _keep_alive(self) -> None:
        """A connection on which nothing is under way, nor waited for, ends after a while, whatever came last."""
        idle = self.cycle is not None and self.cycle.response_complete and not self._awaits_request
        if idle and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _watch(self) -> None:
        """The one timer of a connection: it looks again when patience would end if nothing came."""
        if self._is_left_unread():
            self.transport.abort()
            return
        left_s = min(self._received_s + self.patience_s, self._body_until_s) - self.loop.time()
        waits = self._awaits_request and not self.flow.read_paused and not self._waits()
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
        """Whether the client has taken nothing for so long of what is left of a complete answer. That may be all of it,
        and nothing else watches it; `KeepAlive` watches streams that are under way."""
        unsent_bytes, now_s = self.transport.get_write_buffer_size(), self.loop.time()
        made = self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
        if not unsent_bytes or unsent_bytes != self._unsent_bytes or not made:
            self._unsent_bytes, self._taken_s = unsent_bytes, now_s
        return now_s - self._taken_s >= self.patience_s

    def _late(self) -> UserError:
        within_s = self.patience_s if self.loop.time() < self._body_until_s else self.body_s
        message = f"the rest of the request did not come within {within_s:g} s"
        return UserError(message, status=408, code="request_timeout")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._together.unread.hold(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._together.unread.hold(self, 0)

    def abort(self) -> None:
        """The unread part of its answer is larger than others', and all together are too large."""
        self.transport.abort()

    def make_room(self) -> None:
        """Ends this connection: there are too many, and it has waited longest for its client."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self._awaits_request and self._requests:
            self._refuse(_crowded())
        else:
            self.transport.close()

    def give_up(self) -> None:
        """Its incomplete and waiting requests are larger than others', and all together are too large. Requests that
        wait are not answered: the connection ends after the answer that is under way."""
        self._counts = False
        if self._waits() and self._running and not self._running.response_complete:
            self._drop_waiting()
            self._ignore_input()
            self._running.keep_alive = False
        else:
            self._refuse(_crowded())

    def _ignore_input(self) -> None:
        """Nothing is kept of a head that is not all there, in the parser neither."""
        self._ignores_input = True
        self._held = b""
        self.parser = None  # type: ignore[assignment]
        if self._in_head:
            self.headers.clear()
            self.url = b""

    def _break_off(self, error: UserError) -> None:
        """The reader of the body answers with the error, as with any other: under the request's id, logged and counted.
        The connection ends with that."""
        cycle, self._broke_off = self.cycle, True
        cycle.scope["extensions"][_BROKEN_OFF] = error  # type: ignore[assignment]
        cycle.keep_alive = cycle.more_body = False
        cycle.message_event.set()

    def _refuse(self, error: UserError) -> None:
        """Answers for the last time on this connection. A reply that is under way is finished first, and nothing is
        written into it."""
        if self.transport.is_closing():
            return
        self._ignore_input()
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


def _has_left(transport: asyncio.Transport) -> bool:
    """Whether the system has the end of what the client sends, behind what is not read yet."""
    state = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state in (_TCP_CLOSE, _TCP_CLOSE_WAIT)


def _without_upgrade(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")
        if name != b"upgrade":
            yield name, value


def _refuse_unclear(method: bytes, version: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises UserError if another server might read the request as another one, or as two."""
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


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The length of the body that the parser has accepted; 0 where the body comes in chunks."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


def _without_chunks(cycle: RequestResponseCycle) -> None:
    """A client of HTTP/1.0 does not understand chunks: a body without a length ends with the connection."""
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


def _not_understood(data: bytes, error: httptools.HttpParserError) -> UserError:
    """The parser knows no method but those that are registered, and calls the beginning of TLS one that it lacks."""
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        if data.startswith(_TLS_HANDSHAKE):
            return UserError("this server speaks plain HTTP: use http://", code="invalid_http")
        if begins := _REQUEST.match(data):
            message = f"the method {begins[1].decode()} is not known: use GET or POST"
            return UserError(message, status=501, code="unknown_method")
    return _no_request()


def _crowded() -> UserError:
    message = "too many requests are unfinished; send this one at once"
    return UserError(message, status=503, code="unfinished_requests", kind="server_error")


def _head_too_large() -> UserError:
    return UserError(f"the head is larger than {HEAD_BYTES_MAX} bytes", status=431)


def _chunks_too_small() -> UserError:
    message = (
        f"more than {SMALL_CHUNKS_MAX} chunks have less than {CHUNK_BYTES_LEAST} bytes on average: send larger ones"
    )
    return UserError(message, code="invalid_http")


def _framing_too_large() -> UserError:
    message = f"chunk extensions and trailers take more than {FRAMING_BYTES_MAX} bytes"
    return UserError(message, code="invalid_http")
