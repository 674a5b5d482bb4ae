"""Host memory that the GPU copies from and to at full speed. Not run on a GPU."""

from __future__ import annotations

from aegis.device.cuda_driver import CudaError, Driver
from aegis.device.host_memory import MappedFile


class PinnedFile:
    """A `HostRegion` page-locked by the driver, so that copies run at full speed beside the caller.

    What cannot be page-locked (a file on disk on some systems) stays pageable: right, but slower; `pinned` tells.
    """

    def __init__(self, driver: Driver, path: str, *, writable: bool, populate: bool) -> None:
        self._driver = driver
        self._file = MappedFile(path, writable=writable, populate=populate)
        self.base = self._file.base
        self.nbytes = self._file.nbytes
        flags = driver.api.CU_MEMHOSTREGISTER_PORTABLE | (0 if writable else driver.api.CU_MEMHOSTREGISTER_READ_ONLY)
        try:
            driver("cuMemHostRegister", self.base, self.nbytes, flags)
            self.pinned = True
        except CudaError:
            self.pinned = False

    def close(self) -> None:
        """Unlocks and unmaps it; a second call does nothing."""
        if self.pinned:
            self._driver("cuMemHostUnregister", self.base)
            self.pinned = False
        self._file.close()
        self.base = 0
