"""The owner's side of a GPU's memory: every page made once, handed to instances as descriptors.

Written from the documentation of CUDA 13; not run on a GPU. Making and exporting memory needs no context, so the owner
costs the GPU nothing; only to wipe what a lost process left does it take a context, for as long as that lasts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Lock
from typing import Any

from aegis.core.errors import UserError
from aegis.core.ids import PageRun
from aegis.device.cuda.driver import Context, CudaError, Driver, Gpu
from aegis.device.cuda.handle_sharing import BATCH, HandleServer, Measures

PAGE_BYTES = 2 << 20


class CudaPool:
    """A `PhysicalPool` of `nbytes` of one GPU, rounded down to pages; `ordinal` is the GPU's number.

    All memory is taken at once, so that it cannot run out later. Raises UserError if there is no such GPU, not so much
    memory, or none that processes can share.
    """

    def __init__(self, nbytes: int, *, ordinal: int = 0, driver: Driver | None = None) -> None:
        self._driver = driver or Driver()
        self._gpu = Gpu(self._driver, ordinal)
        try:
            step = self._gpu.granularity()
        except CudaError as error:
            raise UserError(f"GPU {ordinal} has no memory that processes can share: {error}", param="device") from error
        self.page_bytes = -(-PAGE_BYTES // step) * step
        self.page_count = nbytes // self.page_bytes
        if self.page_count < 1:
            raise UserError(f"the device memory must be at least {self.page_bytes} bytes, not {nbytes}")
        self._handles = self._make()
        self._lock = Lock()  # handles are exported by the server's threads
        self._server = HandleServer(Measures(ordinal, self.page_bytes, self.page_count), self._export)

    @property
    def address(self) -> str:
        return self._server.address

    def wipe(self, runs: Sequence[PageRun]) -> None:
        driver, size = self._driver, self.page_bytes
        with ExitStack() as held:
            context = Context(self._gpu)
            held.callback(context.close)
            stream = driver("cuStreamCreate", driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
            held.callback(driver, "cuStreamDestroy", stream)
            window = int(driver("cuMemAddressReserve", BATCH * size, size, 0, 0))
            held.callback(driver, "cuMemAddressFree", window, BATCH * size)
            for run in runs:
                for start in range(run.start, run.stop, BATCH):
                    self._wipe(self._handles[start : min(start + BATCH, run.stop)], window, stream)

    def close(self) -> None:
        self._server.close()
        with self._lock:
            while self._handles:
                self._driver("cuMemRelease", self._handles.pop())

    def _make(self) -> list[Any]:
        handles: list[Any] = []
        try:
            for _ in range(self.page_count):
                handles.append(self._driver("cuMemCreate", self.page_bytes, self._gpu.memory, 0))
        except CudaError as error:
            got = len(handles) * self.page_bytes
            for handle in handles:
                self._driver("cuMemRelease", handle)
            wanted = self.page_count * self.page_bytes
            raise UserError(
                f"the GPU has {got >> 20} MiB free, not the {wanted >> 20} MiB of device memory asked for ({error}); "
                "ask for less with --device-memory"
            ) from error
        return handles

    def _wipe(self, handles: Sequence[Any], window: int, stream: Any) -> None:
        driver, size, mapped = self._driver, self.page_bytes, 0
        try:
            for handle in handles:
                driver("cuMemMap", window + mapped * size, size, 0, handle, 0)
                mapped += 1
            driver("cuMemSetAccess", window, mapped * size, [self._gpu.access], 1)
            driver("cuMemsetD8Async", window, 0, mapped * size, stream)
            driver("cuStreamSynchronize", stream)
        finally:
            if mapped:
                driver("cuMemUnmap", window, mapped * size)

    def _export(self, run: PageRun) -> list[int]:
        fds: list[int] = []
        try:
            with self._lock:
                for handle in self._handles[run.start : run.stop]:
                    fds.append(int(self._driver("cuMemExportToShareableHandle", handle, self._gpu.fd_type, 0)))
        except CudaError:  # a process may have too few descriptors for all
            for fd in fds:
                os.close(fd)
            raise
        return fds
