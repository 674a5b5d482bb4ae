"""Links within one machine: Unix stream sockets, each message preceded by its length.

A link never waits, so a thread that polls and an event loop share it. There is no thread between a sender and the
socket: as far as the other end has room, the message is with the kernel when `send` returns, and is received even if
the sender dies.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aegis.telemetry.logs import log
from aegis.transport.addresses import path_of

_logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16
_READS = 8  # at a time: others come in between, however much is said
_LINGER_S = 1.0
_PAUSE_S = 1.0
_LATER = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM}


class LocalWire:
    """One end of a connection. What the other end does not take yet is kept, however much that is."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._unsent = bytearray()
        self._unread = bytearray()
        self._is_broken = False  # nothing can be sent any more
        self.open = True  # the other end may still say something
        self.more = False  # is to be received at once: a loop may never be told of it again

    @classmethod
    def to(cls, address: str, identity: str) -> LocalWire:
        """Connects and sends its identity. If nothing listens, the link is closed: the peer that listened is lost,
        which is handled elsewhere."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        wire = cls(connection)
        connection.setblocking(True)  # many may connect at once
        try:
            connection.connect(path_of(address))
        except OSError:
            wire.close()
        else:
            connection.setblocking(False)
            wire.send(identity.encode())
        return wire

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """`flush` is due once the socket takes more."""
        return bool(self._unsent)

    def send(self, body: bytes) -> None:
        if self.open and not self._is_broken:
            self._unsent += _LENGTH.pack(len(body)) + body
            self.flush()

    def flush(self) -> None:
        """To an end that has closed it is dropped. What that one has said is heard nevertheless."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except OSError as error:
            if error.errno not in _LATER:
                self._is_broken = True
                self._unsent.clear()

    def receive(self) -> list[bytes]:
        """The messages that are there; of very many the first."""
        self.more = True
        for _ in range(_READS):
            try:
                data = self._socket.recv(_READ_BYTES) if self.open else b""
            except BlockingIOError:
                self.more = False
                break
            except OSError:
                data = b""
            if not data:
                self.open = self.more = False
                break
            self._unread += data
        return self._messages()

    def close(self, linger_s: float = 0.0) -> None:
        """Unsent messages have this long to be sent."""
        self.open = False
        if self._unsent and linger_s:
            self._socket.settimeout(linger_s)
            with suppress(OSError):
                self._socket.sendall(self._unsent)
        self._socket.close()

    def _messages(self) -> list[bytes]:
        messages: list[bytes] = []
        unread, at = self._unread, 0
        while len(unread) >= at + _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(unread, at)[0]
            if len(unread) < end:
                break
            messages.append(bytes(unread[at + _LENGTH.size : end]))
            at = end
        del unread[:at]
        return messages


class LocalWires:
    """The wires of one thread, which waits for any of them."""

    def __init__(self, identity: str) -> None:
        self._identity = identity
        self._wires: list[LocalWire] = []
        self._heeded: list[int] = []

    def connected(self, address: str) -> LocalWire:
        wire = LocalWire.to(address, self._identity)
        self._wires.append(wire)
        return wire

    def cut(self, wire: LocalWire) -> None:
        """Messages that were sent on it and not received yet never are."""
        self._wires.remove(wire)
        wire.close()

    def heed(self, descriptor: int) -> None:
        """Waits end once it can be read."""
        self._heeded.append(descriptor)

    def wait(self, timeout_ms: int) -> list[LocalWire]:
        """The links on which something may have come. Meanwhile sends messages that could not be sent at once."""
        poll, listening = select.poll(), {wire.fileno(): wire for wire in self._wires if wire.open}
        for wire in listening.values():
            poll.register(wire, select.POLLIN | (select.POLLOUT if wire.unsent else 0))
        for descriptor in self._heeded:
            poll.register(descriptor, select.POLLIN)
        ready = [listening[descriptor] for descriptor, _ in poll.poll(timeout_ms) if descriptor in listening]
        for wire in ready:
            wire.flush()
        return ready

    def close(self) -> None:
        end_s = time.monotonic() + _LINGER_S
        for wire in self._wires:
            wire.close(linger_s=max(end_s - time.monotonic(), 0.0))


class LocalEnd:
    """A wire of one event loop. `on_messages` is told of what comes, `lost` that nothing will any more."""

    def __init__(
        self, wire: LocalWire, on_messages: Callable[[list[bytes]], None], lost: Callable[[], None] = lambda: None
    ) -> None:
        self._wire = wire
        self._on_messages = on_messages
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._waits = False  # for the socket to take more
        if wire.open:
            self._loop.add_reader(wire, self._readable)

    def send(self, body: bytes) -> None:
        self._wire.send(body)
        self._watch()

    def close(self) -> None:
        if self._wire.fileno() >= 0:
            self._loop.remove_reader(self._wire)
            self._loop.remove_writer(self._wire)
            self._wire.close()

    def _readable(self) -> None:
        if messages := self._wire.receive():
            self._on_messages(messages)
        if self._wire.more:
            self._loop.call_soon(self._readable)
        elif not self._wire.open and self._wire.fileno() >= 0:
            self.close()
            self._lost()

    def _writable(self) -> None:
        self._wire.flush()
        self._watch()

    def _watch(self) -> None:
        if self._waits != self._wire.unsent:
            self._waits = self._wire.unsent
            if self._waits:
                self._loop.add_writer(self._wire, self._writable)
            else:
                self._loop.remove_writer(self._wire)


class LocalPort:
    """A port that many connect to, of one event loop. `on_messages` gets each sender and its messages."""

    def __init__(self, address: str, on_messages: Callable[[str, list[bytes]], None]) -> None:
        self.address = address
        self._on_messages = on_messages
        self._ends: dict[str, LocalEnd] = {}
        self._unidentified: set[LocalEnd] = set()
        path = Path(path_of(address))
        path.unlink(missing_ok=True)  # the former listener is gone
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(socket.SOMAXCONN)
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def send(self, identity: str, body: bytes) -> None:
        """To one that is gone it is dropped."""
        if end := self._ends.get(identity):
            end.send(body)

    def close(self) -> None:
        if self._pause:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for end in (*self._unidentified, *self._ends.values()):
            end.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # too many files are open
            log(_logger, logging.ERROR, "nobody can connect", {"why": str(error)})
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(_PAUSE_S, self._listen)
            return
        self._serve(LocalWire(connection))

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _serve(self, wire: LocalWire) -> None:
        identity = ""

        def on_messages(messages: list[bytes]) -> None:
            nonlocal identity
            if not identity:
                identity, messages = messages[0].decode(), messages[1:]
                self._unidentified.discard(end)
                self._ends[identity] = end
            if messages:
                self._on_messages(identity, messages)

        def lost() -> None:
            self._unidentified.discard(end)
            if self._ends.get(identity) is end:
                del self._ends[identity]

        end = LocalEnd(wire, on_messages, lost)
        self._unidentified.add(end)
