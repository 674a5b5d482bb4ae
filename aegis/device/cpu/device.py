"""The CPU device: real memory, real threads, real events; everything of aegis runs on it."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.copy_lanes import CopyLane
from aegis.device.cpu.lanes import CpuLane, DividedCores
from aegis.device.cpu.libc import copy
from aegis.device.cpu.pages import PhysicalPages
from aegis.device.cpu.peer_memory import CpuPeerMemory
from aegis.device.cpu.pool import PAGE_BYTES
from aegis.device.cpu.ranges import CpuRange
from aegis.device.cpu.streams import CpuStream
from aegis.device.divisions import Shares
from aegis.device.host_memory import MappedFile
from aegis.device.shared_events import SharedWords


class CpuDevice:
    """A `Device` over the pool at `address`, which several processes open. Raises UserError when the pool is gone.

    `words` are the node's and stay the caller's; `stream_words` are those among them that this device's streams may
    take, in order (all, if not given), each still 0. `threads` are those that engines compute with, by default as many
    as OpenMP starts. Pages are granted and revoked, ranges mapped and unmapped by one thread; any may open a host
    region.
    """

    def __init__(
        self,
        address: str,
        words: SharedWords,
        *,
        stream_words: Sequence[int] | None = None,
        threads: int | None = None,
    ) -> None:
        self.name = "cpu"
        self.device_wide = 0
        self._words = words
        self._free_words = list(range(words.count) if stream_words is None else stream_words)
        self._pages = PhysicalPages(address)
        self.page_bytes = PAGE_BYTES
        self.page_count = self._pages.count
        self._streams: list[CpuStream] = []
        self._ranges: list[CpuRange] = []
        self._regions: set[MappedFile] = set()
        self._inwards, self._outwards, self._between = CopyLane(), CopyLane(), CopyLane()
        self._divided = DividedCores(threads)

    def reserve(self, nbytes: int) -> CpuRange:
        self._ranges.append(CpuRange(nbytes, self._pages))
        return self._ranges[-1]

    def grant(self, runs: Sequence[PageRun]) -> None:
        self._pages.grant(runs)

    def revoke(self, runs: Sequence[PageRun]) -> None:
        self._pages.revoke(runs)

    def stream(self, name: str, *, outwards: bool = False, between: bool = False) -> CpuStream:
        lane = self._between if between else self._outwards if outwards else self._inwards
        self._streams.append(CpuStream(name, self._free_words.pop(0), self._words, self._pages, lane))
        return self._streams[-1]

    def open_peer(self, address: str, runs: Sequence[PageRun]) -> CpuPeerMemory | None:
        try:
            return CpuPeerMemory(address, runs)
        except OSError:
            return None

    def move(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for target, source, nbytes in copies:
            copy(target, source, nbytes)

    @property
    def lanes_are_timed(self) -> bool:
        return self._divided.timed

    def partitions(self) -> tuple[Shares, ...]:
        return self._divided.partitions

    def lanes(self, shares: Shares) -> tuple[CpuLane, ...]:
        return self._divided.lanes(shares)

    def passed(self, event: EventHandle) -> bool:
        return self._words.load(event.word) >= event.value

    def wait(self, event: EventHandle, *, timeout_ns: int) -> bool:
        return self._words.wait(event.word, event.value, timeout_ns=timeout_ns)

    def open_host(self, path: str, *, writable: bool, populate: bool = True) -> MappedFile:
        region = MappedFile(path, writable=writable, populate=populate)
        self._regions.add(region)
        self._regions.difference_update([known for known in tuple(self._regions) if not known.base])
        return region

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        for space in self._ranges:
            space.close()
        for region in self._regions:
            region.close()
        self._pages.close()
