"""HTTP/1.1 as uvicorn speaks it, with what it lacks: bounds on heads and on waiting for the rest of a request, errors
in our form, a connection cut at once, or where nobody reads what is left of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aegis.core.errors import UserError
from proxy.http.errors import error_body
from proxy.http.replies import encode
from proxy.http.request_ids import HEADER, new_id

HEAD_BYTES_MAX = 64 << 10
PATIENCE_S = 60.0
_CUT = "aegis.cut"
_BROKEN_OFF = "aegis.broken-off"
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_BETWEEN_FIELDS = len(": \r\n")


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
    _awaits_request = True  # the rest of one, or all of the first
    _in_head = False
    _head_bytes = 0  # of what is complete, and
    _unread_bytes = 0  # of all that came, while the head is not
    _heard_s = 0.0
    _broke_off = False
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
        super().data_received(data)
        if not self._in_head:
            self._heard_s = self.loop.time()
            return
        self._unread_bytes += len(data)
        if self._unread_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._awaits_request = self._in_head = True
        self._head_bytes = self._unread_bytes = 0
        self._heard_s = self.loop.time()
        self.scope["extensions"] = {_CUT: self.transport.abort}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + _BETWEEN_FIELDS

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head_bytes > HEAD_BYTES_MAX:
            raise _head_too_large()  # the parser stops, and `send_400_response` is called
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._awaits_request = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        too_large = self._head_bytes > HEAD_BYTES_MAX
        self._refuse(_head_too_large() if too_large else UserError("this is no HTTP/1.1 request", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Who asks for a WebSocket is answered as if it had not. uvicorn's warning names packages to install, with
        which there would be no more WebSockets here than without."""

    def _watch(self) -> None:
        """One timer for a connection: it looks again when patience would end, if nothing were to come."""
        if self._is_left_unread():
            self.transport.abort()
            return
        left_s = self._heard_s + self.patience_s - self.loop.time()
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
        message = f"the rest of the request did not come within {self.patience_s:g} s"
        return UserError(message, status=408, code="request_timeout")

    def _break_off(self, error: UserError) -> None:
        """Who reads the body answers with the error, like with any other: under the request's id, logged and counted.
        The connection ends with that."""
        cycle, self._broke_off = self.cycle, True
        cycle.scope["extensions"][_BROKEN_OFF] = error  # type: ignore[assignment]
        cycle.keep_alive = cycle.more_body = False
        cycle.message_event.set()

    def _refuse(self, error: UserError) -> None:
        body = encode(error_body(error))
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (error.status, _REASONS[error.status])
        head += b"%s: %s\r\n" % (HEADER, new_id().encode())
        self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        self.transport.close()


def _head_too_large() -> UserError:
    return UserError(f"the head is larger than {HEAD_BYTES_MAX} bytes", status=431)
