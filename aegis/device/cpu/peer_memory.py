"""Pages of another CPU device: of the same kind of file, which any process of the user may map."""

from __future__ import annotations

import os
from collections.abc import Sequence

from aegis.core.ids import PageRun
from aegis.device.cpu.libc import map_file
from aegis.device.cpu.pages import AddressSpace
from aegis.device.cpu.pool import PAGE_BYTES


class CpuPeerMemory:
    """A `PeerMemory`: readable, not writable. Raises OSError if no process has that pool."""

    __slots__ = ("_space", "base", "nbytes")

    def __init__(self, address: str, runs: Sequence[PageRun]) -> None:
        pages = sum([run.pages for run in runs])
        self._space: AddressSpace | None = None
        fd = os.open(address, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._space = AddressSpace(pages)
            self.base, self.nbytes = self._space.base, pages * PAGE_BYTES
            at = self.base
            for run in runs:
                count = run.pages * PAGE_BYTES
                map_file(fd, count, offset=run.start * PAGE_BYTES, address=at, writable=False, populate=False)
                at += count
        except OSError:
            self.close()
            raise
        finally:
            os.close(fd)

    def close(self) -> None:
        if self._space is not None:
            self._space.close()
            self._space = None
