"""The cost of moving KV on the CPU device: blocks between the device's pages and the host's slabs, beside memcpy.

A request's blocks are one transfer on a stream, as an instance submits it. As many as make 64 MiB are queued behind a
gate, as at a switch; the time runs from its opening to the last one's event. The time that submitting takes of the
instance's own thread is reported apart. The memcpy beside it moves as many bytes in pieces as long as a transfer, each
contiguous, between the same two memories. `ratio` is the median of the quotients of such neighbours.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from aegis.core.block_runs import BlockCopy, paired, runs_of
from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.block_copies import block_copies
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.libc import copy
from aegis.device.cpu.pool import PAGE_BYTES, CpuPool
from aegis.device.host_memory import SharedMemory
from aegis.device.shared_events import SharedWords
from bench.lab.memory.page_mapping import timed

BLOCK_BYTES = tuple(kib << 10 for kib in (16, 64, 256, 2048))
BLOCKS = (64, 256)
REGION_BYTES = 512 << 20
_BURST_BYTES = 64 << 20
_TIMEOUT_NS = 60_000_000_000
_GATE = 1  # the word of the event that starts a burst

Copies = tuple[BlockCopy, ...]


class Swap(Struct, frozen=True):
    """`blocks` of `block_bytes` in one transfer; `scattered`: at random places on both sides, else in a row on both."""

    block_bytes: int
    blocks: int
    scattered: bool
    memcpy_bytes_per_s: float
    out_bytes_per_s: float
    out_ratio: float
    in_bytes_per_s: float
    in_ratio: float
    submit_ns: int  # per transfer


class Ground:
    """`nbytes` of the device, mapped, and as many of the host, and a stream."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        pages = nbytes // PAGE_BYTES
        self._pool = CpuPool(nbytes, ahead_pages=0)
        self._words = SharedWords.create(2)
        self._memory = SharedMemory.create(nbytes, "host")
        self._device = CpuDevice(self._pool.address, self._words, stream_words=[1 - _GATE])
        self._device.grant([PageRun(0, pages)])
        kv = self._device.reserve(nbytes)
        kv.map(0, [PageRun(0, pages)])
        self._kv = kv.base
        self._host = self._device.open_host(self._memory.path, writable=True).base
        self._stream = self._device.stream("swap")
        self._opened = 0
        copy(self._kv, self._host, nbytes)
        copy(self._host, self._kv, nbytes)

    def submit(self, transfers: Sequence[Copies], block_bytes: int, *, out: bool) -> None:
        self._opened += 1
        self._stream.wait(EventHandle(_GATE, self._opened))
        source, target = (self._kv, self._host) if out else (self._host, self._kv)
        for transfer in transfers:
            copies = block_copies(
                transfer, slab_bytes=PAGE_BYTES, block_bytes=block_bytes, source=source, target=target
            )
            self._last = self._stream.copy(copies)

    def swap(self) -> None:
        self._words.store(_GATE, self._opened)
        assert self._device.wait(self._last, timeout_ns=_TIMEOUT_NS)

    def memcpy(self, transfers: Sequence[Copies], block_bytes: int, *, out: bool) -> None:
        source, target = (self._kv, self._host) if out else (self._host, self._kv)
        nbytes = sum(count for *_, count in transfers[0]) * block_bytes
        for transfer in transfers:
            at, to = (min(block * block_bytes, self.nbytes - nbytes) for block in transfer[0][:2])
            copy(target + to, source + at, nbytes)

    def close(self) -> None:
        self._device.close()
        self._pool.close()
        self._memory.close()
        self._words.close()


def swaps(
    block_bytes: Sequence[int] = BLOCK_BYTES, blocks: Sequence[int] = BLOCKS, region_bytes: int = REGION_BYTES
) -> tuple[Swap, ...]:
    """Every size with every count, of those that fit into the regions, which are cut in slabs of a page."""
    ground = Ground(region_bytes)
    results = [
        _measure(ground, nbytes, count, scattered)
        for nbytes in block_bytes
        for count in blocks
        for scattered in (False, True)
        if count <= region_bytes // PAGE_BYTES * (PAGE_BYTES // nbytes)
    ]
    ground.close()
    return tuple(results)


def _measure(ground: Ground, block_bytes: int, blocks: int, scattered: bool, repetitions: int = 7) -> Swap:
    there = ground.nbytes // PAGE_BYTES * (PAGE_BYTES // block_bytes)
    count = min(max(1, _BURST_BYTES // (blocks * block_bytes)), there // blocks)
    submits_ns, memcpys_ns = list[int](), list[int]()
    moves_ns: dict[bool, list[int]] = {True: [], False: []}
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * repetitions):
        out = turn % 2 == 0
        transfers = _transfers(there, blocks, count, scattered, seed=turn)
        submits_ns.append(timed(partial(ground.submit, transfers, block_bytes, out=out)))
        moves_ns[out].append(timed(ground.swap))
        memcpys_ns.append(timed(partial(ground.memcpy, transfers, block_bytes, out=out)))
        ratios[out].append(memcpys_ns[-1] / moves_ns[out][-1])
    nbytes = count * blocks * block_bytes
    return Swap(
        block_bytes=block_bytes,
        blocks=blocks,
        scattered=scattered,
        memcpy_bytes_per_s=nbytes / statistics.median(memcpys_ns) * 1e9,
        out_bytes_per_s=nbytes / statistics.median(moves_ns[True]) * 1e9,
        out_ratio=statistics.median(ratios[True]),
        in_bytes_per_s=nbytes / statistics.median(moves_ns[False]) * 1e9,
        in_ratio=statistics.median(ratios[False]),
        submit_ns=round(statistics.median(submits_ns) / count),
    )


def _transfers(there: int, blocks: int, count: int, scattered: bool, *, seed: int) -> list[Copies]:
    """`count` transfers of so many of the blocks that are `there`, none named twice on a side."""
    rng = random.Random(seed)
    if scattered:
        sides = [rng.sample(range(there), blocks * count) for _ in range(2)]
    else:
        starts = [rng.sample(range(there // blocks), count) for _ in range(2)]
        sides = [[start * blocks + k for start in side for k in range(blocks)] for side in starts]
    parts = [slice(at, at + blocks) for at in range(0, blocks * count, blocks)]
    return [paired(*(runs_of(side[part]) for side in sides)) for part in parts]
