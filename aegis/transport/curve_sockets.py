"""Links between machines: CURVE sockets of ZeroMQ (CurveZMQ, RFC 26), with keys made at launch.

A peer that does not know the public key of the market cannot send anything: only instances get the key, so it serves as
their password. A link that breaks is mended, and messages sent meanwhile wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq

from aegis.transport.addresses import Keys

_AT_ONCE = 256  # messages: others come in between, however much is said


def new_keys() -> Keys:
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


class CurveWire:
    """One end of a connection."""

    def __init__(self, wire: zmq.Socket[bytes]) -> None:
        self.socket = wire

    def send(self, body: bytes) -> None:
        """Queues at once. If another peer listens at the address by now, or refuses us, there is no queue any more and
        the message is dropped: the peer that was there is lost, which is handled elsewhere."""
        with suppress(zmq.Again):
            self.socket.send(body, zmq.NOBLOCK, copy=False)

    def receive(self) -> list[bytes]:
        """All messages that are there."""
        messages: list[bytes] = []
        with suppress(zmq.Again):
            while True:
                messages.append(self.socket.recv(zmq.NOBLOCK))
        return messages


class CurveWires:
    """The wires of one thread, which waits for any of them. `market_key` is the public one."""

    def __init__(self, identity: str, market_key: str) -> None:
        self._context = zmq.Context()
        self._identity = identity.encode()
        self._market_key = market_key.encode()
        self._poller = zmq.Poller()
        self._wires: list[CurveWire] = []

    def connected(self, address: str) -> CurveWire:
        wire = self._context.socket(zmq.DEALER)
        wire.setsockopt(zmq.IDENTITY, self._identity)
        wire.setsockopt(zmq.LINGER, 1000)
        wire.set_hwm(0)
        wire.curve_publickey, wire.curve_secretkey = zmq.curve_keypair()
        wire.curve_serverkey = self._market_key
        wire.connect(address)
        self._poller.register(wire, zmq.POLLIN)
        self._wires.append(CurveWire(wire))
        return self._wires[-1]

    def cut(self, wire: CurveWire) -> None:
        """Messages that were sent on it and not received yet never are."""
        self._wires.remove(wire)
        self._poller.unregister(wire.socket)
        wire.socket.close(linger=0)

    def heed(self, descriptor: int) -> None:
        """Waits end once it can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> list[CurveWire]:
        """The links on which something has come."""
        ready = dict(self._poller.poll(timeout_ms))
        return [wire for wire in self._wires if wire.socket in ready]

    def close(self) -> None:
        for wire in self._wires:
            wire.socket.close()
        self._context.term()


class CurvePort:
    """A port that many connect to, of one event loop. `on_messages` gets each sender and its messages. A port that is
    left open (`tcp://127.0.0.1:*`) is found in `address`.

    A ZeroMQ socket's descriptor is edge-triggered, and a send swallows the edge of what has just come in. So it is read
    again after every send; `zmq.asyncio`, which learns of no send but its own, would wait for ever.
    """

    def __init__(self, address: str, on_messages: Callable[[str, list[bytes]], None], keys: Keys) -> None:
        self._on_messages = on_messages
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._due = False  # a look is
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._look)

    def send(self, identity: str, body: bytes) -> None:
        """To one that is gone it is dropped."""
        self._socket.send_multipart((identity.encode(), body), zmq.NOBLOCK)
        self._look_later()

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()

    def _look_later(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._due = False
        if self._socket.closed:
            return
        for _ in range(_AT_ONCE):
            try:
                identity, body = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_messages(identity.decode(), [body])
        self._look_later()
