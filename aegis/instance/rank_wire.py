"""The wire between the ranks of one instance: the first says what is done, the others what their copies have done.

Every rank is a process with a device of its own, and with shared words, host slabs and a model cache that it shares
with the same rank of other instances. Their accounts are the same, for all parts of a model are of one size. So a
follower performs the very effects that the first rank's core decided, page by page and slab by slab, and needs no core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import msgspec
import numpy as np
import zmq
from msgspec import Struct

from aegis.core.clock import NS_PER_MS
from aegis.core.events import LoadFailed, Progress
from aegis.core.ids import ModelId, PageRun
from aegis.core.model import ModelSpec
from aegis.device.memory_executor import MemoryEffect
from aegis.engine.block_table import BlockTable
from aegis.engine.parallel.group import RanksLost


class Prepare(Struct, frozen=True, tag=True):
    """A model will be bound."""

    spec: ModelSpec


class Discard(Struct, frozen=True, tag=True):
    """The model will not be bound after all: what was prepared for it is of no use."""

    spec: ModelSpec


class Touch(Struct, frozen=True, tag=True):
    """An image lies in these extents of the model cache now."""

    extents: tuple[PageRun, ...]


class Step(Struct, frozen=True, tag=True):
    """`Engine.step`: for each row its tokens, the first one's position, and whether it samples. No blocks: they are
    those of the step before, as `packed`. `reports`: of the one row, which is a prompt, logprobs are asked for."""

    model: ModelId
    tokens: list[tuple[int, ...]]
    starts: list[int]
    samples: list[bool]
    blocks: list[bytes] | None
    reports: bool = False


Command = MemoryEffect | Prepare | Discard | Touch | Step
Report = Progress | LoadFailed

_encoder = msgspec.msgpack.Encoder()
_command = msgspec.msgpack.Decoder(Command)
_reports = msgspec.msgpack.Decoder(list[Report])


def packed(blocks: BlockTable) -> bytes:
    return blocks.tobytes()


def unpacked(blocks: bytes) -> BlockTable:
    return np.frombuffer(blocks, dtype=np.int64)


class FollowerLinks:
    """The first rank's end. Any thread may tell them something."""

    def __init__(self, rendezvous: str, ranks: int) -> None:
        self.ranks = ranks
        self._context = zmq.Context()
        self._lock = Lock()
        self._parted = False
        self._sockets = [self._bound(rendezvous, rank) for rank in range(1, ranks)]

    def send(self, command: Command) -> None:
        """All of them, in the same order. Raises RanksLost."""
        if self._parted:
            raise RanksLost
        body = _encoder.encode(command)
        with self._lock:
            for socket in self._sockets:
                socket.send(body)

    def part(self) -> None:
        """A step was not the same for all of them; nothing more can be."""
        self._parted = True

    def reports(self) -> list[list[Report]]:
        """The reports of each of them since the last call."""
        with self._lock:
            return [_received(socket) for socket in self._sockets]

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def _bound(self, rendezvous: str, rank: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.bind(_address(rendezvous, rank))
        return socket


class LeaderLink:
    """A follower's end."""

    def __init__(self, rendezvous: str, rank: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(_address(rendezvous, rank))

    def receive(self, timeout_ns: int) -> Command | None:
        """The next command, if there is one within that time."""
        if not self._socket.poll(timeout_ns // NS_PER_MS):
            return None
        command: Command = _command.decode(self._socket.recv())
        return command

    def report(self, reports: Sequence[Report]) -> None:
        if reports:
            self._socket.send(_encoder.encode(reports))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def _address(rendezvous: str, rank: int) -> str:
    return f"ipc://{rendezvous}-{rank}"


def _received(socket: zmq.Socket[bytes]) -> list[Report]:
    reports: list[Report] = []
    while socket.poll(0):
        reports += _reports.decode(socket.recv())
    return reports


SendCommand = Callable[[Command], None]
"""`FollowerLinks.send`."""
