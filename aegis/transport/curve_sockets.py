"""Links between machines: CURVE sockets of ZeroMQ (CurveZMQ, RFC 26), with keys made at launch.

A peer that does not know the public key of the market cannot send anything: only instances get the key, so it serves as
their password.

A connection that breaks takes the messages along that were under way, so no other is made in its place: the instance
ends, and its requests are replayed elsewhere, as if it had been killed. It learns of a break from its own end of the
connection, or from the system, which looks after a quiet one and says when its other end cannot be reached any more. An
instance that has lost a proxy goes on, if the node drops that proxy.

It is the other machine's system that answers, and not the peer: a launcher that stands still, as with Ctrl-Z, is there
all the same. Heartbeats of ZeroMQ's would take it for gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from aegis.transport.addresses import Keys
from aegis.transport.failures import LinkBroken

_AT_ONCE = 256  # messages: others come in between, however much is said
_ASKED_S = 5
_SILENT_S = 30
"""A machine that is silent for so long is gone."""

_RECONNECT_MS = 60_000
"""By then a process whose link is broken has ended. A port that cannot be reached at first is tried again then, too."""

_DROPPED_WITHIN_S = 10.0
"""A proxy whose link breaks alone has ended itself, which the node, on the same machine, sees and says sooner."""


def new_keys() -> Keys:
    public, secret = zmq.curve_keypair()
    return Keys(public.decode(), secret.decode())


class CurveWire:
    """One end of a connection. `monitor` can be read once it has broken; then it is closed, and `broke_s` set."""

    def __init__(self, wire: zmq.Socket[bytes], address: str) -> None:
        self.socket = wire
        self.address = address
        self.monitor: zmq.Socket[bytes] | None = wire.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.broke_s: float | None = None

    @property
    def has_messages(self) -> bool:
        return bool(self.socket.poll(0))

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
    """The wires of one thread, which waits for any of them; the first is the node's, the others are proxies'.
    `market_key` is the public one."""

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
        wire.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        _look_after(wire)
        wire.curve_publickey, wire.curve_secretkey = zmq.curve_keypair()
        wire.curve_serverkey = self._market_key
        connected = CurveWire(wire, address)
        wire.connect(address)
        self._poller.register(wire, zmq.POLLIN)
        self._poller.register(connected.monitor, zmq.POLLIN)
        self._wires.append(connected)
        return connected

    def cut(self, wire: CurveWire) -> None:
        """Messages that were sent on it and not received yet never are."""
        self._wires.remove(wire)
        self._end_monitor(wire)
        self._poller.unregister(wire.socket)
        wire.socket.close(linger=0)

    def heed(self, descriptor: int) -> None:
        """Waits end once it can be read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> list[CurveWire]:
        """The links on which something has come. Raises LinkBroken once all that the node has said is received."""
        ready = dict(self._poller.poll(self._limited_ms(timeout_ms)))
        for wire in self._wires:
            if wire.monitor in ready:
                wire.broke_s = time.monotonic()
                self._end_monitor(wire)
        self._refuse_broken()
        return [wire for wire in self._wires if wire.socket in ready]

    def close(self) -> None:
        for wire in self._wires:
            self._end_monitor(wire)
            wire.socket.close()
        self._context.term()

    def _limited_ms(self, timeout_ms: int) -> int:
        """To the time at which a link that has broken ends the instance."""
        left_s = [self._left_s(wire, wire.broke_s) for wire in self._wires if wire.broke_s is not None]
        return min([timeout_ms, *(max(round(left * 1e3), 0) for left in left_s)])

    def _refuse_broken(self) -> None:
        """Raises LinkBroken, unless the node has said more: it may have dropped the proxy, or ordered the end."""
        for wire in self._wires:
            if wire.broke_s is not None and self._left_s(wire, wire.broke_s) <= 0 and not self._wires[0].has_messages:
                whose = "the launcher" if wire is self._wires[0] else "a proxy"
                raise LinkBroken(f"the link to {whose} at {wire.address} broke")

    def _left_s(self, wire: CurveWire, broke_s: float) -> float:
        within_s = 0.0 if wire is self._wires[0] else _DROPPED_WITHIN_S
        return broke_s + within_s - time.monotonic()

    def _end_monitor(self, wire: CurveWire) -> None:
        if wire.monitor:
            self._poller.unregister(wire.monitor)
            wire.socket.disable_monitor()
            wire.monitor.close(linger=0)
            wire.monitor = None


def _look_after(end: zmq.Socket[bytes]) -> None:
    """Of either end: a connection whose other end's machine is gone without a word is closed, whether it is quiet or
    has something to send."""
    end.setsockopt(zmq.TCP_KEEPALIVE, 1)
    end.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _ASKED_S)
    end.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _ASKED_S)
    end.setsockopt(zmq.TCP_KEEPALIVE_CNT, _SILENT_S // _ASKED_S)
    end.setsockopt(zmq.TCP_MAXRT, 1000 * _SILENT_S)


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
        _look_after(self._socket)
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
