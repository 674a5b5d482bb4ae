"""The actor that hands KV over, one on each node: from host slabs to host slabs.

It is a process of its own, so that moving bytes never keeps the node's process from answering. Regions are named by the
node that has them, and only that node says which file they are.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import ray
from msgspec import Struct
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from aegis.cluster.chunk_stream import Copy, HandOverFailed
from aegis.cluster.direct_transport import TIMEOUT_S, TRANSPORT, Region, RemoteRegion

AT_ONCE = 4
"""Transfers to one node that are under way together; what comes then waits its turn."""

_encoder = msgspec.msgpack.Encoder()


class TransferRequest(Struct, frozen=True):
    """Bytes of `source`, a region that was reached, to `target`, one that was opened here."""

    source: str
    target: str
    copies: tuple[Copy, ...]


class Transferred(Struct, frozen=True, tag=True):
    """All of it is there, as it was at the source."""

    nbytes: int
    took_ns: int


class TransferFailed(Struct, frozen=True, tag=True):
    """Some of it may be there, and is not to be read. `why` is `damaged`, `lost`, `silent` or `unknown`."""

    why: str


Outcome = Transferred | TransferFailed

_orders = msgspec.msgpack.Decoder(TransferRequest)
_outcomes: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)


class _TransferActor:
    """Offers have a thread of their own: two transfer actors that reach for each other never wait for each other."""

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}
        self._reached: dict[str, tuple[RemoteRegion, Any]] = {}  # and the reference that keeps it readable

    def open(self, name: str, path: str) -> int:
        """Makes a file of this node known; returns its bytes. Raises OSError."""
        memory = np.memmap(path, np.uint8, "r+")
        self._regions[name] = Region(memory)
        return len(memory)

    def close(self, name: str) -> None:
        """Nothing is read from it by others nor brought to it any more."""
        self._regions.pop(name).close()

    @ray.method(tensor_transport=TRANSPORT, concurrency_group="offering")  # type: ignore[untyped-decorator]
    def offer(self, name: str) -> Region:
        """Raises LookupError if there is nothing such."""
        return self._regions[name]

    def reach(self, name: str, source: Any, region: str) -> str:
        """That transfer actor's region is known here by `name`, which has none or another until now. Returns the reason
        if it cannot be."""
        try:
            ref = source.offer.remote(region)
            if not ray.wait([ref], timeout=TIMEOUT_S, fetch_local=False)[0]:
                return "silent"
            self._reached[name] = ray.get(ref, timeout=TIMEOUT_S), ref
        except GetTimeoutError:
            return "silent"
        except LookupError:
            return "unknown"
        except RayError:
            return "lost"
        return ""

    @ray.method(concurrency_group="bringing")  # type: ignore[untyped-decorator]
    def transfer(self, order: bytes) -> bytes:
        """A `TransferRequest`, done; returns an `Outcome`."""
        started_ns = time.monotonic_ns()
        wanted = _orders.decode(order)
        target = self._regions[wanted.target].memory
        assert target is not None
        try:
            self._reached[wanted.source][0].read(target, wanted.copies)
        except HandOverFailed as failed:
            return _encoder.encode(TransferFailed(failed.why))
        nbytes = sum(nbytes for _, _, nbytes in wanted.copies)
        return _encoder.encode(Transferred(nbytes, time.monotonic_ns() - started_ns))


def start_transfer_actor(node: str) -> Any:
    """The transfer actor of the node with this id, an actor; it ends with the process that started it."""
    groups = {"offering": 1, "bringing": AT_ONCE}
    transfer_actor = ray.remote(num_cpus=0, enable_tensor_transport=True, concurrency_groups=groups)(_TransferActor)
    return transfer_actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


def transfer(transfer_actor: Any, order: TransferRequest) -> Any:
    """Has the transfer actor do it; an object reference, for `outcome`."""
    return transfer_actor.transfer.remote(_encoder.encode(order))


def outcome(answer: bytes) -> Outcome:
    return _outcomes.decode(answer)
