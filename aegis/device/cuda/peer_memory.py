"""Pages of another GPU, mapped on this one.

Written from the documentation of CUDA 13; not run on a GPU. Handles of the other GPU's pages come from its pool as
those of this one's do. Mapped with access for this GPU (cuMemSetAccess), they are copied from by its own engines over
the peer link, without a context on the other GPU. That the two reach each other is asked first (cuDeviceCanAccessPeer).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from aegis.core.errors import UserError
from aegis.core.ids import PageRun
from aegis.device.cuda.driver import CudaError, Gpu
from aegis.device.cuda.handle_sharing import HandleClient


class CudaPeerMemory:
    """A `PeerMemory`."""

    def __init__(self, gpu: Gpu, client: HandleClient, runs: Sequence[PageRun]) -> None:
        """Raises OSError if the pool does not give the pages, or the driver refuses."""
        self._gpu = gpu
        self._page_bytes = client.measures.page_bytes
        self.nbytes = sum([run.pages for run in runs]) * self._page_bytes
        self._handles: list[Any] = []
        self._mapped = 0
        self.base = int(gpu.driver("cuMemAddressReserve", self.nbytes, self._page_bytes, 0, 0))
        try:
            for run in runs:
                self._map(client, run)
            gpu.driver("cuMemSetAccess", self.base, self.nbytes, [gpu.access], 1)
        except OSError:
            self.close()
            raise

    @classmethod
    def open(cls, gpu: Gpu, address: str, runs: Sequence[PageRun]) -> CudaPeerMemory | None:
        """None if there is no such pool or no way to its GPU."""
        try:
            client = HandleClient(address)
        except UserError:
            return None
        try:
            return cls(gpu, client, runs) if _reaches(gpu, client.measures.ordinal) else None
        except OSError:
            return None
        finally:
            client.close()

    def close(self) -> None:
        driver = self._gpu.driver
        if self._mapped:
            driver("cuMemUnmap", self.base, self._mapped * self._page_bytes)
            self._mapped = 0
        while self._handles:
            driver("cuMemRelease", self._handles.pop())
        if self.base:
            driver("cuMemAddressFree", self.base, self.nbytes)
            self.base = 0

    def _map(self, client: HandleClient, run: PageRun) -> None:
        driver, size = self._gpu.driver, self._page_bytes
        for fds in client.fetch(run):
            try:
                for fd in fds:
                    self._handles.append(driver("cuMemImportFromShareableHandle", fd, self._gpu.fd_type))
                    driver("cuMemMap", self.base + self._mapped * size, size, 0, self._handles[-1], 0)
                    self._mapped += 1
            finally:
                for fd in fds:
                    os.close(fd)


def _reaches(gpu: Gpu, other: int) -> bool:
    """Whether copies go from the other GPU to this one without the host's memory."""
    if other == gpu.ordinal:
        return True
    try:
        return bool(gpu.driver("cuDeviceCanAccessPeer", gpu.device, gpu.driver("cuDeviceGet", other)))
    except CudaError:
        return False
