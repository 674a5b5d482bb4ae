"""HTTP/1.1 as uvicorn speaks it, with what it lacks: a bound on heads, errors in our form, a connection cut at once."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aegis.core.errors import UserError
from proxy.http.errors import error_body
from proxy.http.replies import encode

HEAD_BYTES_MAX = 64 << 10
_CUT = "aegis.cut"
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


def cut(scope: Scope) -> None:
    """Ends the connection without waiting for who does not read."""
    aborts: dict[str, Callable[[], None]] = scope.get("extensions", {})
    if _CUT in aborts:
        aborts[_CUT]()


class Protocol(HttpToolsProtocol):
    """One connection."""

    _in_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self._refuse(UserError(f"the head is larger than {HEAD_BYTES_MAX} bytes", status=431))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.scope["extensions"] = {_CUT: self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(UserError("this is no HTTP/1.1 request", code="invalid_http"))

    def _refuse(self, error: UserError) -> None:
        body = encode(error_body(error))
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (error.status, _REASONS[error.status])
        self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        self.transport.close()
