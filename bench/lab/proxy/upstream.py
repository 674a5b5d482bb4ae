"""A process that answers over HTTP at once: what LiteLLM's proxy is put before.

Started as `python -m bench.lab.proxy.upstream`; it prints its port. It reads of a request what it needs, and of a
stream it writes a token at a time, those of all streams in turn, as a server that decodes in batches does.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import msgspec
import uvloop
from msgspec import Struct

from bench.lab.proxy.upstream_replies import REPLIES, STREAM_HEAD, Reply


class _Body(Struct):
    """The body of a request of any route; the most tokens of an answer have another name in each."""

    max_tokens: int = 1
    max_output_tokens: int = 0
    stream: bool = False

    @property
    def tokens(self) -> int:
        return self.max_output_tokens or self.max_tokens


class _Stream(Struct):
    reply: Reply
    tokens: int
    left: int


class _Streams:
    """The streams of all connections."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Transport, _Stream] = {}
        self._some = asyncio.Event()

    def add(self, transport: asyncio.Transport, reply: Reply, tokens: int) -> None:
        self._running[transport] = _Stream(reply, tokens, tokens)
        self._some.set()

    def drop(self, transport: asyncio.Transport) -> None:
        self._running.pop(transport, None)

    async def write(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._some.wait()
            while self._running:
                self._step()
                await asyncio.sleep(0)
            self._some.clear()

    def _step(self) -> None:
        for transport, stream in list(self._running.items()):
            if stream.left:
                transport.write(stream.reply.token)
                stream.left -= 1
            else:
                transport.write(stream.reply.last(stream.tokens))
                del self._running[transport]


class _Connection(asyncio.Protocol):
    """Requests come one after the other."""

    def __init__(self, streams: _Streams) -> None:
        self._streams = streams
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._streams.drop(self._transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found or len(rest) < _length(head):
            return
        self._received = b""
        body, reply = msgspec.json.decode(rest, type=_Body), REPLIES[_path(head)]
        if body.stream:
            self._transport.write(STREAM_HEAD + reply.begin)
            self._streams.add(self._transport, reply, body.tokens)
        else:
            self._transport.write(reply.in_one_piece(body.tokens))


def _length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)


def _path(head: bytes) -> bytes:
    return head.split(b" ", 2)[1].partition(b"?")[0]


async def _serve() -> None:
    streams = _Streams()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(streams), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await streams.write()


def main() -> None:
    uvloop.run(_serve())


if __name__ == "__main__":
    main()
