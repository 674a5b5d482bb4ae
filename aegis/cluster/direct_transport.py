"""A tensor transport for Ray's direct transport: the receiver reads the sender's memory, over a connection they share.

Ray hands a region of memory from actor to actor: its receiver can read any pieces of it, as often as it likes, without
another call. The bytes do not go through Ray's object store, which would copy them five more times.

Importing this makes the transport known to Ray, as it has to be in every process that makes or calls such an actor.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)

from aegis.cluster.chunk_stream import KEY_BYTES, Copy, HandOverFailed, Receiver, admit, answer, set_timeout
from aegis.cluster.chunks import Bytes

TRANSPORT = "AEGIS"
TIMEOUT_S = 2.0
"""Without a byte for so long, a transfer has failed."""

_GONE_S = 10
_BREATH_S = 0.1
_KEPT = 4
_STRANGERS_MAX = 64
"""Clients that have not sent the key yet, each of which takes a thread. One more ends the one that has been here for
longest: whoever has the key sends it at once."""

Address = tuple[str, int]


class Region:
    """Memory of this node that others may read, until it is closed. Ray takes it for a tensor."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Bytes) -> None:
        self.memory: Bytes | None = memory

    def close(self) -> None:
        """Transfers under way may still end."""
        self.memory = None


@dataclass
class RegionAddress(TensorTransportMetadata):  # type: ignore[misc]
    """The address of an object at its sender: a client with the key may read it."""

    address: Address = ("", 0)
    key: bytes = b""


class DirectTransport(TensorTransportManager):  # type: ignore[misc]
    """The transport of one process; it listens on the node's own address from its first object on."""

    def __init__(self) -> None:
        self._offered: dict[str, Region] = {}
        self._key = secrets.token_bytes(KEY_BYTES)
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._strangers: dict[socket.socket, None] = {}  # the one that has been here for longest is first

    def tensor_transport_backend(self) -> str:
        return TRANSPORT

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    # --- at the sender ------------------------------------------------------------------------------------------------

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Region]) -> RegionAddress:
        (region,) = rdt_object
        assert region.memory is not None
        self._offered[obj_id] = region
        return RegionAddress([((len(region.memory),), region.memory.dtype)], "cpu", self._listen(), self._key)

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Region]) -> None:
        self._offered.pop(obj_id, None)

    def _listen(self) -> Address:
        with self._lock:
            if self._listener is None:
                self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
                threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
            host, port = self._listener.getsockname()[:2]
            return host, port

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the caller has gone again, or there are no descriptors left
                threading.Event().wait(_BREATH_S)
                continue
            self._receive(connection)

    def _receive(self, stranger: socket.socket) -> None:
        with self._lock:
            self._strangers[stranger] = None
            if len(self._strangers) > _STRANGERS_MAX:
                longest = next(iter(self._strangers))
                del self._strangers[longest]
                with suppress(OSError):  # it has left
                    longest.shutdown(socket.SHUT_RDWR)  # so that its thread ends
        try:
            threading.Thread(target=self._answer, args=(stranger,), daemon=True).start()
        except RuntimeError:  # the system has no thread left
            self._is_stranger_no_more(stranger)
            stranger.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            try:
                _set_up(connection)
                admitted = admit(connection, self._key)
            finally:
                self._is_stranger_no_more(connection)
            if admitted:
                answer(connection, self._find)

    def _is_stranger_no_more(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    def _find(self, obj_id: str) -> Bytes | None:
        region = self._offered.get(obj_id)
        return region.memory if region else None

    # --- at the receiver ----------------------------------------------------------------------------------------------

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: RegionAddress,
        communicator_metadata: Any,
        target_buffers: Any = None,
    ) -> list[RemoteRegion]:
        """Receives nothing yet: the receiver of the object says what to read."""
        return [RemoteRegion(obj_id, tensor_transport_metadata)]

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise AssertionError("the receiver reads")

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """A transfer that has failed has closed its connection already."""


class RemoteRegion:
    """A `Region` of another node, to be read by any number of threads. Connections are kept."""

    def __init__(self, name: str, where: RegionAddress) -> None:
        self._name = name
        self._where = where
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    def read(self, target: Bytes, copies: Sequence[Copy]) -> None:
        """Into `target`, of this node. Raises HandOverFailed; nothing more is written then."""
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        try:
            connection = Receiver(self._name, target, copies, self._connected, kept).run()
        except HandOverFailed:
            self.close()
            raise
        with self._lock:
            if connection and len(self._idle) < _KEPT:
                self._idle.append(connection)
                return
        if connection:
            connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._where.address, TIMEOUT_S)
        _set_up(connection)
        set_timeout(connection, TIMEOUT_S)
        connection.sendall(self._where.key)
        return connection


def _set_up(connection: socket.socket) -> None:
    """Requests are sent at once, and a connection without a peer ends."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GONE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE_S)


register_tensor_transport(TRANSPORT, ["cpu"], DirectTransport, Region)
