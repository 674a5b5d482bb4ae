"""Server-sent events as raw bytes: one write per event, and comments as keep-alive while there is no event, which say
what the stream waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from fastapi import Response
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from aegis.core.errors import UserError
from proxy.http.client_disconnect import ClientGone, while_connected
from proxy.http.errors import error_body, unexpected
from proxy.http.replies import encode
from proxy.http.request_notes import note, note_refusal
from proxy.http.security.http_protocol import cut
from proxy.http.streaming.keep_alive import KeepAlive

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

_log = logging.getLogger(__name__)

Emit = Callable[[bytes], Awaitable[None]]


def event(value: Struct) -> bytes:
    """The JSON is on one line, for clients too that take U+0085, U+2028 and U+2029 for line ends."""
    data = encode(value).replace(b"\xc2\x85", b"\\u0085")
    data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return b"data: " + data + b"\n\n"


def named_event(name: str, value: Struct) -> bytes:
    """One whose name is told beside its data."""
    return f"event: {name}\n".encode() + event(value)


def tagged_events(values: Iterable[Struct]) -> bytes:
    """Each is named by the tag of its type."""
    return b"".join(named_event(str(value.__struct_config__.tag), value) for value in values)


def error_event(error: UserError) -> bytes:
    return event(error_body(error))


def comment(text: str) -> bytes:
    """A comment: clients ignore it, people see it."""
    return f": {' '.join(text.split())}\n\n".encode()


class EventStream(Response):
    """Runs `write`, which emits the events, for as long as the client listens; `close` is called in any case. `status`
    is the text of comments.

    An error of `write` becomes the events that `failed` gives, the last of the stream: a client that saw no end knows
    that the answer is not whole.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        write: Callable[[Emit], Awaitable[None]],
        keep_alive: KeepAlive,
        *,
        close: Callable[[], None] = lambda: None,
        status: Callable[[], str] = lambda: "waiting",
        failed: Callable[[UserError], bytes] = error_event,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._write = write
        self._close = close
        self._keep_alive = keep_alive
        self._status = status
        self._failed = failed

    async def carry_on(self, scope: Scope, emit: Emit) -> None:
        """Writes into a stream that has begun already."""
        try:
            await self._write_or_fail(scope, emit)
        finally:
            self._close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(receive, self._emit_all(scope, send))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            return
        finally:
            self._close()

    async def _emit_all(self, scope: Scope, send: Send) -> None:
        loop = asyncio.get_running_loop()

        async def emit(data: bytes) -> None:
            idle.since_s = loop.time()
            idle.unread += 1
            await send({"type": "http.response.body", "body": data, "more_body": True})
            idle.unread -= 1

        def cut_off() -> None:
            note(scope, cut="the client read nothing")
            cut(scope)

        idle = self._keep_alive.watch(lambda: emit(comment(self._status())), cut_off)
        try:
            await self._write_or_fail(scope, emit)
        finally:
            idle.end()

    async def _write_or_fail(self, scope: Scope, emit: Emit) -> None:
        try:
            await self._write(emit)
        except UserError as error:
            note_refusal(scope, error)
            await emit(self._failed(error))
        except Exception:  # noqa: BLE001 - the status line is sent: the client can only be told in the stream
            _log.exception("stream broke")
            await emit(self._failed(unexpected()))
