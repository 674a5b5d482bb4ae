"""The wire between the proxy process and its instances: ZeroMQ on a private socket, msgpack messages in batches.

An instance's identity on the wire is `name/incarnation`, so what a dead process sent can be told from what its
successor sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import zmq

from aegis.core.clock import NS_PER_MS
from aegis.core.messages import FromInstance, ToInstance
from aegis.telemetry.decisions import Decisions
from aegis.telemetry.spans import Spans

Said = FromInstance | Spans | Decisions
"""What an instance sends."""

_encoder = msgspec.msgpack.Encoder()
_to_instance = msgspec.msgpack.Decoder(list[ToInstance])
_from_instance = msgspec.msgpack.Decoder(list[Said])


class InstanceLink:
    """An instance's end; blocking, one thread."""

    def __init__(self, address: str, identity: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, messages: Sequence[Said]) -> None:
        self._socket.send(_encoder.encode(messages), copy=False)

    def receive(self, timeout_ns: int) -> list[ToInstance]:
        """All messages that are there; waits up to `timeout_ns`, to the next millisecond, for the first."""
        messages: list[ToInstance] = []
        if timeout_ns and not self._socket.poll(-(-timeout_ns // NS_PER_MS)):
            return messages
        while True:
            try:
                messages += _to_instance.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class ProxyLink:
    """The proxy's end, of one event loop.

    A ZeroMQ socket's descriptor is edge-triggered, and a send swallows the edge of what has just come in. So the reader
    looks again after every send; `zmq.asyncio`, which learns of no send but its own, would wait for ever.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._perhaps_readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._perhaps_readable.set)

    def send(self, identity: str, messages: Sequence[ToInstance]) -> None:
        """Queues at once; to an identity that is gone it is dropped, as its death is handled elsewhere."""
        self._socket.send_multipart((identity.encode(), _encoder.encode(messages)), zmq.NOBLOCK)
        self._perhaps_readable.set()

    async def receive(self) -> tuple[str, list[Said]]:
        while True:
            self._perhaps_readable.clear()
            try:
                identity, body = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await self._perhaps_readable.wait()
            else:
                await asyncio.sleep(0)  # clients come in between, however much the instances say
                return identity.decode(), _from_instance.decode(body)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()
