"""The node's model cache as one instance has it: mapped whole, once, and made ready in a thread beside serving.

On CUDA mapping it page-locks it, which takes a second for a few GiB; elsewhere a page that this process touches for
the first time makes a copy nearly twice as slow. So extents are touched when an image has come to lie in them; they
stay mapped, whatever image lies in them later.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from aegis.core.errors import UserError
from aegis.core.ids import PageRun
from aegis.core.model import IMAGE_EXTENT_BYTES
from aegis.device.cpu.libc import populate
from aegis.device.protocol import Device, HostRegion

_AT_ONCE = 8
"""Extents touched at a time: the process's other threads can map nothing meanwhile."""

_logger = logging.getLogger(__name__)


class CachedImages:
    """Maps the region at `path`, read-only."""

    def __init__(self, device: Device, path: str) -> None:
        self._device = device
        self._region: HostRegion | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images")
        self._opening = self._thread.submit(self._open, path)

    @property
    def base(self) -> int | None:
        """The address of the model cache; None as long as it is not mapped: images come through the stage then."""
        return self._region.base if self._region else None

    def touch(self, extents: Sequence[PageRun]) -> None:
        """An image lies in these extents now."""
        self._thread.submit(self._touch, extents)

    def settle(self) -> None:
        """Waits until all that was begun is done. Raises UserError if there is nothing to map."""
        self._opening.result()
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Ends the thread; before the device is closed."""
        self._thread.shutdown(cancel_futures=True)

    def _open(self, path: str) -> None:
        try:
            self._region = self._device.open_host(path, writable=False, populate=False)
        except UserError as error:
            _logger.error("every load comes from disk, for the model cache cannot be used: %s", error.message)
            raise

    def _touch(self, extents: Sequence[PageRun]) -> None:
        if self._region is None:
            return
        for start, stop in extents:
            for at in range(start, stop, _AT_ONCE):
                count = min(_AT_ONCE, stop - at)
                populate(self._region.base + at * IMAGE_EXTENT_BYTES, count * IMAGE_EXTENT_BYTES)
