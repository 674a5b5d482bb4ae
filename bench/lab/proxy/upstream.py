"""A process that answers chat completions over HTTP at once: what LiteLLM's proxy is put before.

Started as `python -m bench.lab.proxy.upstream`; it prints its port. It reads of a request what it needs, and of a
stream it writes a token at a time, those of all streams in turn, as a server that decodes in batches does.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import msgspec
import uvloop
from msgspec import Struct

from bench.lab.proxy.model import AT_ONCE, WORD

_HEAD = "HTTP/1.1 200 OK\r\ncontent-type: "
_STREAM_HEAD = f"{_HEAD}text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".encode()


class _CompletionBody(Struct):
    max_tokens: int
    stream: bool = False


class _Streams:
    """Of all connections."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Transport, int] = {}
        self._some = asyncio.Event()

    def add(self, transport: asyncio.Transport, tokens: int) -> None:
        self._left[transport] = tokens
        self._some.set()

    def drop(self, transport: asyncio.Transport) -> None:
        self._left.pop(transport, None)

    async def write(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._some.wait()
            while self._left:
                self._step()
                await asyncio.sleep(0)
            self._some.clear()

    def _step(self) -> None:
        for transport, left in list(self._left.items()):
            if left:
                transport.write(_TOKEN)
                self._left[transport] = left - 1
            else:
                transport.write(_LAST)
                del self._left[transport]


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
        completion = msgspec.json.decode(rest, type=_CompletionBody)
        if completion.stream:
            self._transport.write(_STREAM_HEAD)
            self._streams.add(self._transport, completion.max_tokens)
        else:
            self._transport.write(_whole(completion.max_tokens))


def _length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    chosen = {"index": 0, "finish_reason": None, **choice}
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": AT_ONCE, "choices": [chosen]}


def _event(choice: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(_answer("chat.completion.chunk", choice)) + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _whole(tokens: int) -> bytes:
    message = {"role": "assistant", "content": WORD * tokens}
    usage = {"prompt_tokens": 64, "completion_tokens": tokens, "total_tokens": 64 + tokens}
    answer = _answer("chat.completion", {"message": message, "finish_reason": "length"}) | {"usage": usage}
    data = msgspec.json.encode(answer)
    return f"{_HEAD}application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


_TOKEN = _chunk(_event({"delta": {"role": "assistant", "content": WORD}}))
_LAST = _chunk(_event({"delta": {}, "finish_reason": "length"}) + b"data: [DONE]\n\n") + b"0\r\n\r\n"


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
