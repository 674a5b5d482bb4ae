"""Ends the wait of a thread that polls descriptors, from another thread."""

from __future__ import annotations

import os
from contextlib import suppress


class Wakeup:
    """A descriptor that can be read from a `ring` to the next `clear`. Any thread may ring."""

    __slots__ = ("_descriptor",)

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
