"""The wire between the proxy process and its instances: ZeroMQ on a private socket, msgpack messages in batches.

An instance's identity on the wire is `name/incarnation`, so what a dead process sent can be told from what its
successor sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from aegis.core.messages import FromInstance, ToInstance

_encoder = msgspec.msgpack.Encoder()
_to_instance = msgspec.msgpack.Decoder(list[ToInstance])
_from_instance = msgspec.msgpack.Decoder(list[FromInstance])


class InstanceLink:
    """An instance's end; blocking, one thread."""

    def __init__(self, address: str, identity: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, messages: Sequence[FromInstance]) -> None:
        self._socket.send(_encoder.encode(messages), copy=False)

    def receive(self, timeout_ms: int) -> list[ToInstance]:
        """All messages that are there; waits up to `timeout_ms` for the first."""
        messages: list[ToInstance] = []
        if timeout_ms and not self._socket.poll(timeout_ms):
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
    """The proxy's end; asyncio."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._sync: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)

    def send(self, identity: str, messages: Sequence[ToInstance]) -> None:
        """Queues at once; to an identity that is gone it is dropped, as its death is handled elsewhere."""
        self._sync.send_multipart((identity.encode(), _encoder.encode(messages)), zmq.NOBLOCK)

    async def receive(self) -> tuple[str, list[FromInstance]]:
        identity, body = await self._socket.recv_multipart()
        return identity.decode(), _from_instance.decode(body)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
