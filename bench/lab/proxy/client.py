"""A client that costs little beside what it measures: one connection, one request at a time, bytes made beforehand."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Protocol, cast

from msgspec import Struct

from aegis.core.errors import UserError
from bench.lab.proxy.routes import CHAT, Route

_HOST = "127.0.0.1"
_WAIT_S = 60.0
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Took(Struct, frozen=True):
    """The time from sending a request to its first token, and to the end of its answer."""

    first_ns: int
    total_ns: int


class Asker(Protocol):
    """Something that answers."""

    async def ask(self, body: bytes) -> Took: ...


class Connection(asyncio.Protocol):
    """Keeps alive. Implements `Asker`; `reply` are the bytes of the last answer."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._transport: asyncio.Transport
        self._sent_ns = 0
        self._first_ns = 0
        self._await_answer()

    @classmethod
    async def open(cls, port: int, route: Route = CHAT) -> Connection:
        """Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(lambda: cls(route), _HOST, port)
        return connection

    async def ask(self, body: bytes) -> Took:
        """Raises UserError if the answer is not a whole one with status 200."""
        self.send(body)
        async with asyncio.timeout(_WAIT_S):
            await self._done
        took = Took(self._first_ns - self._sent_ns, time.perf_counter_ns() - self._sent_ns)
        if not self.reply.startswith(b"HTTP/1.1 200 ") or not self._first_ns:
            raise UserError(f"a proxy answered {self.reply[:500].decode(errors='replace')!r}")
        return took

    def send(self, body: bytes) -> None:
        self._await_answer()
        head = f"POST {self._route.path} HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\n"
        self._sent_ns = time.perf_counter_ns()
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def begun(self) -> None:
        """Returns when something of the answer is there."""
        async with asyncio.timeout(_WAIT_S):
            await self._begun

    def length(self) -> int:
        """The tokens of the last answer, in one piece or streamed; of a vector its values."""
        return self._route.length(self.reply)

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def connection_lost(self, error: Exception | None) -> None:
        del error
        for waited in (self._done, self._begun):
            if not waited.done():
                waited.set_exception(UserError("a proxy closed the connection before it had answered"))
                waited.exception()  # perhaps no caller waits for it

    def data_received(self, data: bytes) -> None:
        if not self._first_ns and (self._route.token.search(data) or self._route.whole.search(data)):
            self._first_ns = time.perf_counter_ns()
        self.reply += data
        if not self._begun.done():
            self._begun.set_result(None)
        if not self._done.done() and self._is_whole():
            self._done.set_result(None)

    def _await_answer(self) -> None:
        loop = asyncio.get_running_loop()
        self.reply, self._first_ns = b"", 0
        self._done: asyncio.Future[None] = loop.create_future()
        self._begun: asyncio.Future[None] = loop.create_future()

    def _is_whole(self) -> bool:
        head = self.reply.find(_HEAD_END)
        if head < 0:
            return False
        body = head + len(_HEAD_END)
        length = _LENGTH.search(self.reply, 0, head)
        return len(self.reply) - body >= int(length[1]) if length else self.reply.endswith(_LAST_CHUNK, body)
