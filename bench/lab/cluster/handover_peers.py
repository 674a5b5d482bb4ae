"""The competitors of hand-overs between nodes: the same bytes over a socket, and through Ray's object store.

One actor on each node, with the same memory mapped as the transfer actor there.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import ray

from aegis.cluster.chunks import Bytes

_OBJECT_BYTES = 8 << 20
_AHEAD = 4
"""The best of 1, 4, 8 and 16 MiB with 2, 4 and 8 ahead."""


class _Peer:
    def __init__(self, path: str, ip: str) -> None:
        self._region: Bytes = np.memmap(path, np.uint8, "r+")
        self._ip = ip

    def listen(self, nbytes: int) -> int:
        """Sends so many bytes to the first client that connects to this port."""
        listener = socket.create_server((self._ip, 0))
        threading.Thread(target=self._send, args=(listener, nbytes), daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    def receive(self, address: tuple[str, int], nbytes: int) -> int:
        """The nanoseconds that it takes, connecting included."""
        started_ns = time.monotonic_ns()
        view = self._region.data[:nbytes]
        with socket.create_connection(address) as connection:
            while view:
                view = view[connection.recv_into(view) :]
        return time.monotonic_ns() - started_ns

    def part(self, start: int, stop: int) -> Bytes:
        return self._region[start:stop]

    def fetch(self, source: Any, nbytes: int) -> int:
        """Fetches as much through the object store, as objects of a few MiB that are asked for ahead."""
        started_ns = time.monotonic_ns()
        starts, under_way = deque(range(0, nbytes, _OBJECT_BYTES)), deque[tuple[int, Any]]()
        while starts or under_way:
            while starts and len(under_way) < _AHEAD:
                start = starts.popleft()
                under_way.append((start, source.part.remote(start, min(nbytes, start + _OBJECT_BYTES))))
            start, ref = under_way.popleft()
            part = ray.get(ref)
            self._region[start : start + len(part)] = part
        return time.monotonic_ns() - started_ns

    def _send(self, listener: socket.socket, nbytes: int) -> None:
        with listener, listener.accept()[0] as connection:
            connection.sendall(self._region.data[:nbytes])


def start_peer(node: str, path: str, ip: str) -> Any:
    """Starts a peer on the node with this id."""
    placed = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_concurrency=2)(_Peer).options(scheduling_strategy=placed).remote(path, ip)
