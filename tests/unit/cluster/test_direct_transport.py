"""The sender's side of Ray's direct transport: who may read, and what clients cost that say nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aegis.cluster.chunk_stream import NAME_BYTES
from aegis.cluster.chunks import Bytes
from tests.live.server import eventually

if TYPE_CHECKING:
    from aegis.cluster.direct_transport import DirectTransport, RegionAddress

ray = pytest.importorskip("ray", reason="no Ray; pip install -e '.[ray]'")
NAME = "f" * NAME_BYTES
SOURCE: Bytes = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
WITHIN_S = 5.0  # half of what a client has to send the key


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DirectTransport, RegionAddress]]:
    from aegis.cluster.direct_transport import DirectTransport, Region

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    transport = DirectTransport()
    yield transport, transport.extract_tensor_transport_metadata(NAME, [Region(SOURCE)])


def _is_read(where: RegionAddress) -> bool:
    from aegis.cluster.direct_transport import RemoteRegion

    region, target = RemoteRegion(NAME, where), np.zeros_like(SOURCE)
    region.read(target, [(0, 0, len(SOURCE))])
    region.close()
    return bool((target == SOURCE).all())


def test_clients_that_say_nothing_take_few_threads_and_keep_nobody_out(
    offered: tuple[DirectTransport, RegionAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aegis.cluster.direct_transport._STRANGERS_MAX", 4)
    transport, where = offered
    before = threading.active_count()
    with ExitStack() as silent:
        for _ in range(40):
            last = silent.enter_context(socket.create_connection(where.address, WITHIN_S))
        assert _is_read(where)
        eventually(lambda: threading.active_count() <= before + 4, "the threads of those that went end", WITHIN_S)
        last.sendall(where.key)
        eventually(lambda: len(transport._strangers) < 4, "who has sent the key is no stranger", WITHIN_S)
    eventually(lambda: threading.active_count() <= before, "nobody is left", WITHIN_S)


def test_without_a_thread_for_a_client_the_next_is_served(
    offered: tuple[DirectTransport, RegionAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, where = offered
    with monkeypatch.context() as patch:

        def none_left(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", none_left)
        with socket.create_connection(where.address, WITHIN_S) as refused:
            assert refused.recv(1) == b""
    assert _is_read(where)
