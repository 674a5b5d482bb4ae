"""The wires of a market: ZeroMQ, msgpack messages in batches. On private sockets, or, between machines, encrypted.

An instance has one to its node and one to each proxy, so that nothing about a request passes through anybody else. Its
identity on all of them is `name/incarnation`, so what a dead process sent can be told from what its successor sends. A
proxy that is not in the node's process has one to the node besides.

Between machines they are CURVE sockets (CurveZMQ, RFC 26) with keys made at launch. Who does not know the public key of
the market cannot say a word: it is told to instances alone, so it serves as their password.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from msgspec import Struct

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import ProxyId
from aegis.core.messages import DropProxy, FromInstance, Greeting, ToInstance
from aegis.runtime.addressing import addressed
from aegis.telemetry.decisions import Decisions
from aegis.telemetry.spans import Spans

Said = FromInstance | Spans | Decisions
"""What an instance sends."""

T = TypeVar("T")


class Keys(Struct, frozen=True):
    """Of the sockets that all others connect to."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> Keys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


_encoder = msgspec.msgpack.Encoder()
_to_instance = msgspec.msgpack.Decoder(list[ToInstance])


class InstanceLink:
    """An instance's end of all its wires; blocking, one thread. `market_key` is the public one, where there is one."""

    def __init__(self, node_address: str, identity: str, market_key: str = "") -> None:
        self._market_key = market_key
        self._context = zmq.Context()
        self._identity = identity.encode()
        self._poller = zmq.Poller()
        self._node = self._connected(node_address)
        self._proxies: dict[ProxyId, zmq.Socket[bytes]] = {}

    def meet(self, proxy: ProxyId, address: str, greeting: Greeting) -> None:
        """What is sent about its requests goes there from now on, after the greeting."""
        socket = self._proxies[proxy] = self._connected(address)
        _send(socket, [greeting])

    def leave(self, proxy: ProxyId) -> None:
        """The proxy is lost: what it said and is not received yet never is."""
        socket = self._proxies.pop(proxy, None)
        if socket:
            self._poller.unregister(socket)
            socket.close(linger=0)

    def send(self, messages: Sequence[Said]) -> None:
        """To whom it concerns; what concerns a lost proxy is dropped."""
        for proxy, its in addressed(messages, self._proxies).items():
            socket = self._node if proxy is None else self._proxies.get(proxy)
            if socket:
                _send(socket, its)

    def receive(self, timeout_ns: int) -> list[ToInstance]:
        """All messages that are there; waits up to `timeout_ns`, to the next millisecond, for the first."""
        messages: list[ToInstance] = []
        if timeout_ns and not self._poller.poll(-(-timeout_ns // NS_PER_MS)):
            return messages
        while body := _received(self._node):
            told = _to_instance.decode(body)
            for message in told:
                if isinstance(message, DropProxy):
                    self.leave(message.proxy)
            messages += told
        for socket in self._proxies.values():
            while body := _received(socket):
                messages += _to_instance.decode(body)
        return messages

    def close(self) -> None:
        for socket in (self._node, *self._proxies.values()):
            socket.close()
        self._context.term()

    def _connected(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.set_hwm(0)
        if self._market_key:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = self._market_key.encode()
        socket.connect(address)
        self._poller.register(socket, zmq.POLLIN)
        return socket


def _send(socket: zmq.Socket[bytes], messages: Sequence[object]) -> None:
    """Queues at once. Where another listens at the address by now, or does not let us in, there is no queue any more
    and it is dropped: whoever was there is lost, which is handled elsewhere."""
    with suppress(zmq.Again):
        socket.send(_encoder.encode(messages), zmq.NOBLOCK, copy=False)


def _received(socket: zmq.Socket[bytes]) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None


class _LoopSocket:
    """A socket of one event loop.

    A ZeroMQ socket's descriptor is edge-triggered, and a send swallows the edge of what has just come in. So the reader
    looks again after every send; `zmq.asyncio`, which learns of no send but its own, would wait for ever.
    """

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.set_hwm(0)
        self._perhaps_readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._listened_to = False

    def send(self, parts: Sequence[bytes]) -> None:
        self.socket.send_multipart(parts, zmq.NOBLOCK)
        self._perhaps_readable.set()

    async def receive(self) -> list[bytes]:
        if not self._listened_to:  # before, a readable descriptor would only keep the loop awake
            self._loop.add_reader(self.socket.fileno(), self._perhaps_readable.set)
            self._listened_to = True
        while True:
            self._perhaps_readable.clear()
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await self._perhaps_readable.wait()
            else:
                await asyncio.sleep(0)  # clients come in between, however much is said
                return parts

    def close(self) -> None:
        self._loop.remove_reader(self.socket.fileno())
        self.socket.close()
        self._context.term()


class Hub(Generic[T]):
    """The end that many are connected to: a node's or a proxy's, of one event loop. `said` is what they send. A port
    that is left open (`tcp://127.0.0.1:*`) is found in `address`."""

    def __init__(self, address: str, said: Any, keys: Keys | None = None) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[said])
        self._wire = _LoopSocket(zmq.ROUTER)
        socket = self._wire.socket
        if keys:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.bind(address)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, identity: str, messages: Sequence[object]) -> None:
        """Queues at once; to an identity that is gone it is dropped, as its death is handled elsewhere."""
        self._wire.send((identity.encode(), _encoder.encode(messages)))

    async def receive(self) -> tuple[str, list[T]]:
        """What somebody sent, and who."""
        identity, body = await self._wire.receive()
        messages: list[T] = self._decoder.decode(body)
        return identity.decode(), messages

    def close(self) -> None:
        self._wire.close()


class Spoke(Generic[T]):
    """An end connected to a hub, of one event loop. `told` is what the hub sends. What is sent before the hub is there
    waits for it."""

    def __init__(self, address: str, identity: str, told: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[told])
        self._wire = _LoopSocket(zmq.DEALER)
        self._wire.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._wire.socket.connect(address)

    def send(self, messages: Sequence[object]) -> None:
        self._wire.send((_encoder.encode(messages),))

    async def receive(self) -> list[T]:
        (body,) = await self._wire.receive()
        messages: list[T] = self._decoder.decode(body)
        return messages

    def close(self) -> None:
        self._wire.close()
