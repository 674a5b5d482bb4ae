"""Bytes between two real Ray nodes: all of them or a reason, whatever becomes of the node that has them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from aegis.device.host_memory import SharedMemory
from tests.live.market import RAY
from tests.ray_cluster import RayCluster, ray_cluster

ray = pytest.importorskip("ray")

from aegis.cluster.transfer_actor import (  # noqa: E402
    Outcome,
    TransferFailed,
    Transferred,
    TransferRequest,
    outcome,
    start_transfer_actor,
    transfer,
)

pytestmark = pytest.mark.skipif(not RAY, reason="takes half a minute; make test-ray runs it")

NBYTES = 48 << 20
BLOCK_BYTES = 96 << 10
FAILS_WITHIN_S = 6.0


class Ends(NamedTuple):
    """Two transfer actors, and the memory each has as its region `kv`."""

    source: Any
    target: Any
    sent: Any
    arrived: Any

    def transfer(self, order: TransferRequest) -> Outcome:
        return outcome(ray.get(transfer(self.target, order), timeout=60))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as running, running.driver(at=1):
        yield running


@pytest.fixture
def ends(cluster: RayCluster) -> Iterator[Ends]:
    memories = [SharedMemory.create(NBYTES, "kv") for _ in cluster.nodes]
    sent, arrived = (np.memmap(memory.path, np.uint8, "r+") for memory in memories)
    sent[:] = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)
    transfer_actors = [start_transfer_actor(cluster.node_id(at)) for at in range(2)]
    for transfer_actor, memory in zip(transfer_actors, memories, strict=True):
        assert ray.get(transfer_actor.open.remote("kv", memory.path)) == NBYTES
    assert ray.get(transfer_actors[1].reach.remote("far", transfer_actors[0], "kv")) == ""
    yield Ends(*transfer_actors, sent, arrived)
    for transfer_actor in transfer_actors:
        ray.kill(transfer_actor)
    for memory in memories:
        memory.close()


WHOLE = TransferRequest("far", "kv", ((0, 0, NBYTES),))


def test_blocks_get_from_node_to_node(ends: Ends) -> None:
    blocks = NBYTES // BLOCK_BYTES
    mixed = np.random.default_rng(1).permutation(blocks)[: blocks // 2]
    copies = tuple((int(to) * BLOCK_BYTES, at * BLOCK_BYTES, BLOCK_BYTES) for at, to in enumerate(mixed))
    brought = ends.transfer(TransferRequest("far", "kv", copies))
    assert isinstance(brought, Transferred) and brought.nbytes == len(copies) * BLOCK_BYTES
    wanted = np.zeros(NBYTES, np.uint8)
    for to, start, nbytes in copies:
        wanted[to : to + nbytes] = ends.sent[start : start + nbytes]
    assert np.array_equal(ends.arrived, wanted)


def test_many_at_once(ends: Ends) -> None:
    part = NBYTES // 24
    orders = [TransferRequest("far", "kv", ((at, at, part),)) for at in range(0, NBYTES, part)]
    answers = ray.get([transfer(ends.target, order) for order in orders], timeout=60)
    assert all(isinstance(outcome(answer), Transferred) for answer in answers)
    assert np.array_equal(ends.arrived, ends.sent)


def test_what_the_source_has_not_is_told(ends: Ends) -> None:
    assert ray.get(ends.target.reach.remote("more", ends.source, "elsewhere")) == "unknown"
    assert ends.transfer(TransferRequest("far", "kv", ((0, NBYTES, 1),))) == TransferFailed("unknown")
    ray.get(ends.source.close.remote("kv"))
    assert ends.transfer(WHOLE) == TransferFailed("unknown")


def test_a_source_that_is_gone_is_told(ends: Ends) -> None:
    assert isinstance(ends.transfer(WHOLE), Transferred)
    ray.kill(ends.source)
    assert ends.transfer(WHOLE) == TransferFailed("lost")
    assert ray.get(ends.target.reach.remote("far", ends.source, "kv")) == "lost"


def test_a_cut_cable_is_told_and_a_mended_one_serves(cluster: RayCluster, ends: Ends) -> None:
    if not cluster.has_cable:
        pytest.skip("both nodes share one address")
    assert isinstance(ends.transfer(WHOLE), Transferred)
    cluster.cut()
    try:
        began_s = time.monotonic()
        assert ends.transfer(WHOLE) == TransferFailed("silent")
        assert time.monotonic() - began_s < FAILS_WITHIN_S
    finally:
        cluster.mend()
    ends.arrived[:] = 0
    assert isinstance(ends.transfer(WHOLE), Transferred)
    assert np.array_equal(ends.arrived, ends.sent)
