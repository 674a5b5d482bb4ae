"""The CUDA device. Written from the documentation of CUDA 13; not run on a GPU.

Its memory belongs to a `CudaPool` of another process. Its parts are handles of granted pages and ranges over them
(`memory_mapping`), streams that write their progress to shared words (`streams`), page-locked files
(`pinned_memory`), and lanes, into which its compute may be divided (`green_contexts`). Nothing here waits for a whole
device: `device_wide` counts the driver calls that would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.copy_lanes import CopyLane
from aegis.device.cuda.driver import Context, Driver, Gpu
from aegis.device.cuda.green_contexts import DividedGpu, GreenLane
from aegis.device.cuda.handle_sharing import HandleClient
from aegis.device.cuda.memory_mapping import CudaRange, GrantedPages
from aegis.device.cuda.peer_memory import CudaPeerMemory
from aegis.device.cuda.pinned_memory import PinnedFile
from aegis.device.cuda.streams import POLL_NS, CudaStream, WordsOnGpu
from aegis.device.divisions import Shares
from aegis.device.shared_events import SharedWords


class CudaDevice:
    """A `Device`: the GPU whose pool serves `pool_address`, used through its primary context.

    `words` are the node's and stay the caller's; `stream_words` are those among them that this device's streams may
    take, in order (all, if not given), each still 0. Calls come from the thread that made the device; `open_host` may
    come from any. Raises UserError if pool or GPU cannot be had.
    """

    def __init__(
        self,
        pool_address: str,
        words: SharedWords,
        *,
        stream_words: Sequence[int] | None = None,
        driver: Driver | None = None,
    ) -> None:
        self._driver = driver or Driver()
        client = HandleClient(pool_address)
        self._ordinal = client.measures.ordinal
        gpu = Gpu(self._driver, self._ordinal)
        self._context = Context(gpu)
        self._divided = DividedGpu(gpu)
        self._pages = GrantedPages(gpu, client)
        self.page_bytes = self._pages.page_bytes
        self.page_count = self._pages.page_count
        self._words = WordsOnGpu(self._driver, words)
        self._free_words = list(range(words.count) if stream_words is None else stream_words)
        self._streams: dict[int, CudaStream] = {}  # by word
        self._scratch = CudaRange(self._pages, self.page_count * self.page_bytes)
        self._ranges = [self._scratch]
        self._regions: set[PinnedFile] = set()
        self._inwards, self._outwards, self._between = CopyLane(), CopyLane(), CopyLane()
        self._moves = self._driver("cuStreamCreate", self._driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)

    @property
    def name(self) -> str:
        """The name that torch has for it."""
        return f"cuda:{self._ordinal}"

    @property
    def device_wide(self) -> int:
        """The number of driver calls of this process that waited for the whole device: 0 while it serves."""
        return self._driver.device_wide

    def reserve(self, nbytes: int) -> CudaRange:
        self._ranges.append(CudaRange(self._pages, nbytes))
        return self._ranges[-1]

    def grant(self, runs: Sequence[PageRun]) -> None:
        self._pages.grant(runs)

    def revoke(self, runs: Sequence[PageRun]) -> None:
        self._pages.revoke(runs)

    def move(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for destination, source, nbytes in copies:
            self._driver("cuMemcpyAsync", destination, source, nbytes, self._moves)
        self._driver("cuStreamSynchronize", self._moves)

    def stream(self, name: str, *, outwards: bool = False, between: bool = False) -> CudaStream:
        word = self._free_words.pop(0)
        lane = self._between if between else self._outwards if outwards else self._inwards
        self._streams[word] = CudaStream(
            name, word, self._driver, self._context, self._words, self._streams, self._pages, self._scratch, lane
        )
        return self._streams[word]

    def open_peer(self, address: str, runs: Sequence[PageRun]) -> CudaPeerMemory | None:
        return CudaPeerMemory.open(self._pages.gpu, address, runs)

    @property
    def lanes_are_timed(self) -> bool:
        return False

    def partitions(self) -> tuple[Shares, ...]:
        return self._divided.partitions

    def lanes(self, shares: Shares) -> tuple[GreenLane, ...]:
        return self._divided.lanes(shares)

    def passed(self, event: EventHandle) -> bool:
        return self._words.words.load(event.word) >= event.value

    def wait(self, event: EventHandle, *, timeout_ns: int) -> bool:
        deadline_ns = time.monotonic_ns() + timeout_ns
        while not self._words.words.wait(event.word, event.value, timeout_ns=POLL_NS):
            if time.monotonic_ns() > deadline_ns:
                return False
        return True

    def open_host(self, path: str, *, writable: bool, populate: bool = True) -> PinnedFile:
        self._context.enter()
        region = PinnedFile(self._driver, path, writable=writable, populate=populate)
        self._regions.add(region)
        self._regions.difference_update([known for known in tuple(self._regions) if not known.base])
        return region

    def close(self) -> None:
        for stream in self._streams.values():
            stream.end()
        for stream in self._streams.values():
            stream.close()
        self._driver("cuStreamDestroy", self._moves)
        for space in self._ranges:
            space.close()
        for region in self._regions:
            region.close()
        self._pages.close()
        self._words.close()
        self._context.close()
