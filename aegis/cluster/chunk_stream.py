"""Chunks over a connection: asked for by number, answered with a checksum, straight from memory and into it.

A connection begins with a key. Then the receiver asks for pieces of a region, a chunk of them at a time and again and
again, without waiting; the sender answers in that order. Transfers go over a connection one after another.

The checksum is XXH3 (64 bits): it takes a tenth of the time that a socket copy does, where CRC-32 takes half of it.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from xxhash import xxh3_64

from aegis.cluster.chunks import CHUNK_BYTES, PIECES_MAX, Bytes, Piece, cut, views, within
from aegis.cluster.receive_window import (
    ChunkArrived,
    ConnectionBroken,
    Done,
    Event,
    Failed,
    Reconnect,
    RegionUnknown,
    RequestChunk,
    TimedOut,
    Why,
    Window,
)
from aegis.process.buffers import left_after

KEY_BYTES = 32
NAME_BYTES = 56
KEY_WITHIN_S = 10.0
"""A client that connects sends it at once."""

WIDTH = 8
"""Chunks that are asked for ahead."""

_ASK = struct.Struct(f"!{NAME_BYTES}sII")  # region, chunk, pieces; then where each begins and its bytes
_PIECE = np.dtype(">u8")
_ANSWER = struct.Struct("!IQQ")  # chunk, bytes, checksum; no bytes: there is no such chunk
_TIMEVAL = struct.Struct("@ll")


Copy = tuple[int, int, int]
"""Target, source and number of bytes, as `block_copies` has them."""

Connect = Callable[[], socket.socket]


class HandOverFailed(Exception):
    """The bytes did not come; what is where they should be is not to be read."""

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why = why


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """Nothing for so long is an error; with 0 nothing is. It is the system that waits for a whole chunk, and not we for
    every part of it, as we would with a timeout of Python's."""
    connection.settimeout(None)
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


# --- the sender -------------------------------------------------------------------------------------------------------


def admit(connection: socket.socket, key: bytes, *, within_s: float = KEY_WITHIN_S) -> bool:
    """Whether the other side sends the key. Raises OSError."""
    set_timeout(connection, within_s)
    return hmac.compare_digest(_exactly(connection, KEY_BYTES), key)


def answer(connection: socket.socket, find: Callable[[str], Bytes | None]) -> None:
    """Answers one that was admitted until it ends the connection. It may be silent for as long as it likes: the
    connection is kept for the next transfer. Raises OSError."""
    set_timeout(connection, 0)
    while asked := _exactly(connection, _ASK.size):
        name, chunk, count = _ASK.unpack(asked)
        if not 0 < count <= PIECES_MAX:
            return
        pieces = _unpacked(_exactly(connection, 2 * count * _PIECE.itemsize))
        region = find(name.decode("ascii", "replace"))
        nbytes = sum(piece.nbytes for piece in pieces)
        if region is None or nbytes > CHUNK_BYTES or not within(region, pieces):
            connection.sendall(_ANSWER.pack(chunk, 0, 0))
            continue
        content = views(region, pieces)
        _send(connection, [memoryview(_ANSWER.pack(chunk, nbytes, _checksum(chunk, content))), *content])


# --- the receiver -----------------------------------------------------------------------------------------------------


class Receiver:
    """One transfer: pieces of the region that the sender calls `name`, each put in its place in `target`."""

    def __init__(
        self, name: str, target: Bytes, copies: Sequence[Copy], connect: Connect, kept: socket.socket | None = None
    ) -> None:
        """`connect` returns a connection that has begun, its timeout set, or raises OSError; `kept` is such a one,
        of an earlier transfer."""
        assert within(target, [Piece(to, nbytes) for to, _, nbytes in copies])
        self._name = name.encode("ascii")
        self._target = target
        self._sources = cut([Piece(start, nbytes) for _, start, nbytes in copies])
        self._places = cut([Piece(to, nbytes) for to, _, nbytes in copies])
        self._connect = connect
        self._window = Window(len(self._places), WIDTH)
        self._connection = kept

    def run(self) -> socket.socket | None:
        """The connection, for the next transfer, once all is there. Raises HandOverFailed; nothing is written then."""
        pending = deque(self._window.start())
        try:
            while True:
                asks = bytearray()
                while pending:
                    match pending.popleft():
                        case RequestChunk(chunk):
                            pieces = self._sources[chunk]
                            asks += _ASK.pack(self._name, chunk, len(pieces)) + _packed(pieces)
                        case Reconnect():
                            self._close()
                        case Done():
                            return self._connection
                        case Failed(why):
                            raise HandOverFailed(why)
                pending += self._window.on(self._next(asks))
        except BaseException:
            self._close()
            raise

    def _next(self, asks: bytes | bytearray) -> Event:
        """Asks, and takes what comes next."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.sendall(asks)
            return self._take(self._connection)
        except (BlockingIOError, TimeoutError):
            return TimedOut()
        except OSError:
            return ConnectionBroken()

    def _take(self, connection: socket.socket) -> Event:
        head = _exactly(connection, _ANSWER.size)
        if not head:
            return ConnectionBroken()
        chunk, nbytes, checksum = _ANSWER.unpack(head)
        if not nbytes:
            return RegionUnknown()
        if nbytes > CHUNK_BYTES:
            return ConnectionBroken()
        wanted = self._window.wanted(chunk) and nbytes == sum(piece.nbytes for piece in self._places[chunk])
        content = views(self._target, self._places[chunk]) if wanted else [memoryview(bytearray(nbytes))]
        if not _receive(connection, content):
            return ConnectionBroken()
        return ChunkArrived(chunk, wanted and _checksum(chunk, content) == checksum)

    def _close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None


def _packed(pieces: Sequence[Piece]) -> bytes:
    return np.array([(piece.start, piece.nbytes) for piece in pieces], _PIECE).tobytes()


def _unpacked(packed: bytes) -> list[Piece]:
    return [Piece(start, nbytes) for start, nbytes in np.frombuffer(packed, _PIECE).reshape(-1, 2).tolist()]


# --- bytes ------------------------------------------------------------------------------------------------------------


def _checksum(chunk: int, content: Sequence[memoryview]) -> int:
    """The checksum of a chunk: of its bytes and its number."""
    digest = xxh3_64(seed=chunk)
    for view in content:
        digest.update(view)
    return digest.intdigest()


def _send(connection: socket.socket, left: list[memoryview]) -> None:
    while left:
        left = left_after(left, connection.sendmsg(left))


def _receive(connection: socket.socket, left: list[memoryview]) -> bool:
    """False if the other side ends before all is full."""
    while left:
        count = connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        if not count:
            return False
        left = left_after(left, count)
    return True


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Nothing where the other side ends before."""
    received = connection.recv(count, socket.MSG_WAITALL)
    while received and len(received) < count:
        more = connection.recv(count - len(received), socket.MSG_WAITALL)
        if not more:
            return b""
        received += more
    return received
