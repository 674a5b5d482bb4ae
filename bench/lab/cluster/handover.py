"""The speed of KV from node to node, beside a plain socket copy of the same bytes: `aegis lab handover`.

Two Ray nodes on this machine, with a cable between them. Each round copies the same bytes each way of doing it, in
turns, so that other work of the machine affects all alike. Figures are medians over the rounds, measured at the
receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct
from rich.console import Console

from aegis.core.errors import UserError, install_advice
from aegis.device.host_memory import SharedMemory
from bench.common import result_files
from bench.common.figures import Figure, at_least
from bench.common.machine import Machine, describe

if TYPE_CHECKING:
    from bench.lab.cluster.ray_nodes import RayCluster

SIZES_MIB = (1, 16, 64, 256)
ROUNDS = 9
RATIO_MIN = 0.70
_BLOCK_BYTES = 1 << 19
_PLAIN, _HANDED, _STORED = "plain socket", "hand-over", "object store"


class Copies(Struct, frozen=True):
    """Nanoseconds of each round, for the same bytes."""

    nbytes: int
    plain_ns: tuple[int, ...]
    handed_ns: tuple[int, ...]
    stored_ns: tuple[int, ...]


class Result(Struct, frozen=True):
    machine: Machine
    figures: tuple[Figure, ...]
    copies: tuple[Copies, ...]
    cable: bool


class _Stand(NamedTuple):
    """The two nodes' memory, and the transfer actors that move bytes from the first to the second."""

    source: Any  # numpy arrays of bytes
    target: Any
    ways: dict[str, Callable[[int], int]]


def run(json_path: Path | None = None, *, sizes_mib: tuple[int, ...] = SIZES_MIB, rounds: int = ROUNDS) -> Result:
    """Measures, prints the figures and writes all to `json_path`. Raises UserError."""
    if json_path:
        result_files.check(json_path)
    if find_spec("ray") is None:
        raise UserError(f"there is no Ray here; {install_advice('ray')}")
    from bench.lab.cluster.ray_nodes import ray_cluster

    with ray_cluster() as cluster, _stand(cluster, max(sizes_mib) << 20) as stand:
        copies = tuple(_measure(stand, mib << 20, rounds) for mib in sizes_mib)
    figures = tuple(figure for measured in copies for figure in _figures(measured))
    result = Result(describe(), figures, copies, cluster.has_cable)
    console = Console(markup=False, highlight=False)
    for figure in figures:
        console.print(f"{figure.name:44} {figure.value:10.4g} {figure.unit} {figure.wanted}".rstrip())
    if json_path:
        result_files.write_json(json_path, result)
    return result


def _figures(copies: Copies) -> list[Figure]:
    size = f"{copies.nbytes >> 20} MiB"
    rates = [
        Figure(f"{size}, {way}", copies.nbytes / median(took_ns), "GB/s")
        for way, took_ns in ((_PLAIN, copies.plain_ns), (_HANDED, copies.handed_ns), (_STORED, copies.stored_ns))
    ]
    handed = median(a / b for a, b in zip(copies.plain_ns, copies.handed_ns, strict=True))
    stored = median(a / b for a, b in zip(copies.plain_ns, copies.stored_ns, strict=True))
    ratios = [
        at_least(f"{size}, {_HANDED} ÷ {_PLAIN}", handed, "", RATIO_MIN),
        Figure(f"{size}, {_STORED} ÷ {_PLAIN}", stored, ""),
    ]
    return rates + ratios


def _measure(stand: _Stand, nbytes: int, rounds: int) -> Copies:
    took_ns: dict[str, list[int]] = {way: [] for way in stand.ways}
    for number in range(-1, rounds):
        for way in list(stand.ways)[:: 1 if number % 2 else -1]:
            stand.target[:nbytes] = 0
            duration_ns = stand.ways[way](nbytes)
            assert np.array_equal(stand.target[:nbytes], stand.source[:nbytes]), f"{way} brought other bytes"
            if number >= 0:  # the first round warms up
                took_ns[way].append(duration_ns)
    return Copies(nbytes, *[tuple(took_ns[way]) for way in (_PLAIN, _HANDED, _STORED)])


@contextmanager
def _stand(cluster: RayCluster, nbytes: int) -> Iterator[_Stand]:
    import ray

    from aegis.cluster.transfer_actor import Transferred, TransferRequest, outcome, start_transfer_actor, transfer
    from bench.lab.cluster.handover_peers import start_peer

    memories = [SharedMemory.create(nbytes, "handover") for _ in cluster.nodes]
    source, target = (np.memmap(memory.path, np.uint8, "r+") for memory in memories)
    source[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    with cluster.driver(at=1):
        sides = []
        for at, (node, memory) in enumerate(zip(cluster.nodes, memories, strict=True)):
            transfer_actor = start_transfer_actor(cluster.node_id(at))
            ray.get(transfer_actor.open.remote("kv", memory.path))
            sides.append((transfer_actor, start_peer(cluster.node_id(at), memory.path, node.ip)))
        (transfer_actor, peer), (far_actor, far_peer) = sides
        assert ray.get(far_actor.reach.remote("far", transfer_actor, "kv")) == ""

        def plain(nbytes: int) -> int:
            address = cluster.nodes[0].ip, ray.get(peer.listen.remote(nbytes))
            return int(ray.get(far_peer.receive.remote(address, nbytes)))

        def handed(nbytes: int) -> int:
            copies = tuple((at, at, _BLOCK_BYTES) for at in range(0, nbytes, _BLOCK_BYTES))
            brought = outcome(ray.get(transfer(far_actor, TransferRequest("far", "kv", copies))))
            assert isinstance(brought, Transferred), brought
            return brought.took_ns

        def stored(nbytes: int) -> int:
            return int(ray.get(far_peer.fetch.remote(peer, nbytes)))

        yield _Stand(source, target, {_PLAIN: plain, _HANDED: handed, _STORED: stored})
    for memory in memories:
        memory.close()
