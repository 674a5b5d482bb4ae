"""The GPU pages that a process was granted, and the virtual ranges that it maps them into.

Written from the documentation of CUDA 13; not run on a GPU. A page is one handle, so that it can be at any place of any
range; one cuMemSetAccess and one cuMemUnmap serve a whole row of them, which is where the time goes (Prism §5.1 maps
page by page: 36 µs of access and 26 µs of unmapping for each).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

from aegis.core.ids import PageRun
from aegis.device.cuda.driver import CudaError, Gpu
from aegis.device.cuda.handle_sharing import HandleClient


class GrantedPages:
    """Handles of the pages that are this process's, fetched by a thread of its own as they are granted."""

    def __init__(self, gpu: Gpu, client: HandleClient) -> None:
        self.gpu = gpu
        self.page_bytes = client.measures.page_bytes
        self.page_count = client.measures.page_count
        self._client = client
        self._handles: list[Any] = [None] * self.page_count
        self._granted = bytearray(self.page_count)
        self._placed = bytearray(self.page_count)  # 1: the page is in a range
        self._wiping = bytearray(self.page_count)  # 1: it will be wiped
        self._arrived = Condition()
        self._error: Exception | None = None
        self._work: SimpleQueue[tuple[PageRun, ...] | list[Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="gpu pages", daemon=True)
        self._thread.start()

    def grant(self, runs: Sequence[PageRun]) -> None:
        for start, stop in runs:
            assert 0 <= start < stop <= self.page_count, f"there are no pages [{start}, {stop})"
            assert 1 not in self._granted[start:stop], f"pages of [{start}, {stop}) were granted before"
            self._granted[start:stop] = b"\1" * (stop - start)
        self._work.put(tuple(runs))

    def revoke(self, runs: Sequence[PageRun]) -> None:
        self._check_idle(runs)
        handles = self.handles(runs)
        for start, stop in runs:
            self._granted[start:stop] = bytes(stop - start)
            self._handles[start:stop] = [None] * (stop - start)
        self._work.put(handles)

    def handles(self, runs: Sequence[PageRun]) -> list[Any]:
        """The handles of granted pages, in order. Waits for those that are still on their way; raises the error that
        kept them."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._error or all(None not in self._handles[a:b] for a, b in runs))
        if self._error is not None:
            raise self._error
        return [handle for start, stop in runs for handle in self._handles[start:stop]]

    def place(self, runs: Sequence[PageRun]) -> None:
        """Notes that pages entered a range. A page is in one at most."""
        self._check_idle(runs)
        for start, stop in runs:
            self._placed[start:stop] = b"\1" * (stop - start)

    def remove(self, pages: Sequence[int]) -> None:
        """Notes that they left it."""
        for page in pages:
            self._placed[page] = 0

    def start_wiping(self, runs: Sequence[PageRun]) -> None:
        """Until `end_wiping` they can be neither mapped nor revoked."""
        self._check_idle(runs)
        for start, stop in runs:
            self._wiping[start:stop] = b"\1" * (stop - start)

    def end_wiping(self, runs: Sequence[PageRun]) -> None:
        for start, stop in runs:
            self._wiping[start:stop] = bytes(stop - start)

    def close(self) -> None:
        """Releases every handle."""
        self._work.put(None)
        self._thread.join()
        self._client.close()
        for handle in self._handles:
            if handle is not None:
                self.gpu.driver("cuMemRelease", handle)

    def _check_idle(self, runs: Sequence[PageRun]) -> None:
        for start, stop in runs:
            assert 0 not in self._granted[start:stop], f"pages of [{start}, {stop}) were not granted"
            assert 1 not in self._placed[start:stop], f"page {self._placed.index(1, start)} is mapped already"
            assert 1 not in self._wiping[start:stop], f"page {self._wiping.index(1, start)} is being wiped"

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                if isinstance(work, list):
                    for handle in work:
                        self.gpu.driver("cuMemRelease", handle)
                else:
                    for run in work:
                        self._import(run)
        except Exception as error:  # noqa: BLE001 - for whoever waits for a page
            with self._arrived:
                self._error = error
                self._arrived.notify_all()

    def _import(self, run: PageRun) -> None:
        start = run.start
        for fds in self._client.fetch(run):
            try:
                fetched = [self.gpu.driver("cuMemImportFromShareableHandle", fd, self.gpu.fd_type) for fd in fds]
            finally:
                for fd in fds:
                    os.close(fd)
            with self._arrived:
                self._handles[start : start + len(fds)] = fetched
                self._arrived.notify_all()
            start += len(fds)


class CudaRange:
    """A `VirtualRange` on the GPU. Work that touches a page must have completed before the page is unmapped.

    Maps all pages or none: raises OSError if the driver refuses.
    """

    def __init__(self, pages: GrantedPages, nbytes: int) -> None:
        self.page_bytes = pages.page_bytes
        self.nbytes = -(-nbytes // self.page_bytes) * self.page_bytes
        self._pages = pages
        self._driver = pages.gpu.driver
        self._mapped: dict[int, int] = {}  # page by offset in pages
        self.base = int(self._driver("cuMemAddressReserve", self.nbytes, pages.page_bytes, 0, 0))

    def map(self, offset_pages: int, runs: Sequence[PageRun]) -> None:
        pages = [page for start, stop in runs for page in range(start, stop)]
        offsets = range(offset_pages, offset_pages + len(pages))
        assert offset_pages >= 0 and offsets.stop * self.page_bytes <= self.nbytes, "that is not in the range"
        assert self._mapped.keys().isdisjoint(offsets), "there are pages mapped already"
        self._pages.place(runs)
        try:
            self.back(offset_pages, runs)
        except OSError:
            self._pages.remove(pages)
            raise
        self._mapped.update(zip(offsets, pages, strict=True))

    def unmap(self, offset_pages: int, count: int) -> None:
        """Every one of these pages must be mapped."""
        pages = [self._mapped.pop(offset) for offset in range(offset_pages, offset_pages + count)]
        self.bare(offset_pages, count)
        self._pages.remove(pages)

    def back(self, offset_pages: int, runs: Sequence[PageRun]) -> None:
        """The driver's part of `map`, without the accounts."""
        size, address = self.page_bytes, self.base + offset_pages * self.page_bytes
        done = 0
        try:
            for handle in self._pages.handles(runs):
                self._driver("cuMemMap", address + done * size, size, 0, handle, 0)
                done += 1
            self._driver("cuMemSetAccess", address, done * size, [self._pages.gpu.access], 1)
        except CudaError:
            if done:
                self._driver("cuMemUnmap", address, done * size)
            raise

    def bare(self, offset_pages: int, count: int) -> None:
        """The driver's part of `unmap`."""
        self._driver("cuMemUnmap", self.base + offset_pages * self.page_bytes, count * self.page_bytes)

    def close(self) -> None:
        """Unmaps the mapped pages and gives the addresses back; a second call does nothing."""
        if self.base:
            for offset in sorted(self._mapped):
                self.unmap(offset, 1)
            self._driver("cuMemAddressFree", self.base, self.nbytes)
            self.base = 0
