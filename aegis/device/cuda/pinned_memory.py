"""Host memory that the GPU copies from and to at full speed. Not run on a GPU."""

from __future__ import annotations

import logging
import os

from aegis.device.cuda.driver import CudaError, Driver
from aegis.device.host_memory import MappedFile

_logger = logging.getLogger(__name__)


class PinnedFile:
    """A `HostRegion` page-locked by the driver, so that copies run at full speed beside the caller.

    Not every GPU takes memory that is mapped for reading only: then it is mapped for writing too, where that is
    allowed, and written by nobody. What cannot be page-locked (a file on disk on some systems) stays pageable: right,
    but slower, `pinned` tells, and a line in the log.
    """

    def __init__(self, driver: Driver, path: str, *, writable: bool, populate: bool) -> None:
        self._driver = driver
        self._file = MappedFile(path, writable=writable, populate=populate)
        self.pinned = self._pin(writable=writable)
        if not self.pinned and not writable and os.access(path, os.W_OK):
            self._file.close()
            self._file = MappedFile(path, writable=True, populate=populate)
            self.pinned = self._pin(writable=True)
        if not self.pinned:
            _logger.warning("copies are slower: %s cannot be page-locked; see `ulimit -l`", path)
        self.base = self._file.base
        self.nbytes = self._file.nbytes

    def _pin(self, *, writable: bool) -> bool:
        api = self._driver.api
        flags = api.CU_MEMHOSTREGISTER_PORTABLE | (0 if writable else api.CU_MEMHOSTREGISTER_READ_ONLY)
        try:
            self._driver("cuMemHostRegister", self._file.base, self._file.nbytes, flags)
        except CudaError:
            return False
        return True

    def close(self) -> None:
        """Unlocks and unmaps it; a second call does nothing."""
        if self.pinned:
            self._driver("cuMemHostUnregister", self.base)
            self.pinned = False
        self._file.close()
        self.base = 0
