"""The memory of the CPU device: one file in memory (memfd), made by the process that keeps its accounts.

The operating system gives memory to a page when it is touched first, which takes about 1 ms per 2 MiB, ten times what
mapping a page costs that has its memory. So a thread of the owner touches a few pages more than were ever granted, the
lowest first, and sleeps otherwise. What was granted, the processes tell in one byte a page, behind the pages.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from threading import Thread

from aegis.core.errors import UserError
from aegis.core.ids import PageRun
from aegis.device.cpu.libc import futex_wait, futex_wake, map_file, punch, release
from aegis.device.host_memory import SharedMemory

PAGE_BYTES = 2 << 20
AHEAD_PAGES = 32
_LONG_NS = 3_600_000_000_000
_WORD_BYTES = 4


class TouchedPages:
    """The pages that have been granted since they last had no memory: shared by all processes that map `fd`."""

    __slots__ = ("_base", "_flags", "_nbytes", "_word")

    def __init__(self, fd: int, count: int) -> None:
        self._nbytes = self.file_bytes(count)
        self._base = map_file(fd, self._nbytes, offset=count * PAGE_BYTES, populate=False)
        self._word = ctypes.c_uint32.from_address(self._base)
        self._flags = memoryview((ctypes.c_char * count).from_address(self._base + _WORD_BYTES)).cast("B")

    @staticmethod
    def file_bytes(count: int) -> int:
        return _WORD_BYTES + count

    def mark(self, runs: Sequence[PageRun]) -> None:
        """These pages are granted; wakes threads that wait for that, if it is news."""
        news = [run for run in runs if not self.all(*run)]
        for start, stop in news:
            self._flags[start:stop] = b"\1" * (stop - start)
        if news:
            self.wake()

    def all(self, start: int, stop: int) -> bool:
        return 0 not in self._flags[start:stop]

    def unmark(self, run: PageRun) -> None:
        self._flags[run.start : run.stop] = bytes(run.pages)

    def lowest_unmarked(self, count: int) -> list[int]:
        flags, pages, at = bytes(self._flags), list[int](), -1
        while len(pages) < count and (at := flags.find(0, at + 1)) >= 0:
            pages.append(at)
        return pages

    @property
    def version(self) -> int:
        """Changes with every mark."""
        return self._word.value

    def wake(self) -> None:
        self._word.value = time.monotonic_ns() & 0xFFFFFFFF  # several write: counting up could hide a change
        futex_wake(self._base)

    def wait(self, version: int) -> None:
        """Sleeps until the version is another one."""
        futex_wait(self._base, version, _LONG_NS)

    def close(self) -> None:
        self._flags.release()
        release(self._base, self._nbytes)


class CpuPool:
    """A `PhysicalPool` of `memory_bytes`, rounded down to pages. `ahead_pages` have memory before they are granted."""

    def __init__(self, memory_bytes: int, *, ahead_pages: int = AHEAD_PAGES) -> None:
        self.page_bytes = PAGE_BYTES
        self.page_count = memory_bytes // PAGE_BYTES
        if self.page_count < 1:
            raise UserError(f"the device memory must be at least {PAGE_BYTES} bytes, not {memory_bytes}")
        file_bytes = self.page_count * PAGE_BYTES + TouchedPages.file_bytes(self.page_count)
        self._memory = SharedMemory.create(file_bytes, "device")
        self.address = self._memory.path
        self._fd = os.open(self.address, os.O_RDWR | os.O_CLOEXEC)
        self._touched = TouchedPages(self._fd, self.page_count)
        self._has_memory = bytearray(self.page_count)
        self._ahead_pages = ahead_pages
        self._closing = False
        self._thread = Thread(target=self._take_ahead, name="device memory", daemon=True)
        self._thread.start()

    def wipe(self, runs: Sequence[PageRun]) -> None:
        """Gives their memory back to the operating system, which fills what it gives with zeros."""
        for run in runs:
            punch(self._fd, run.start * PAGE_BYTES, run.pages * PAGE_BYTES)
            self._has_memory[run.start : run.stop] = bytes(run.pages)
            self._touched.unmark(run)
        self._touched.wake()

    @property
    def taken_bytes(self) -> int:
        """Memory the operating system has given so far."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        self._closing = True
        self._touched.wake()
        self._thread.join()
        self._touched.close()
        os.close(self._fd)
        self._memory.close()

    def _take_ahead(self) -> None:
        while not self._closing:
            version = self._touched.version
            pages = self._touched.lowest_unmarked(self._ahead_pages)
            bare = [page for page in pages if not self._has_memory[page]]
            if bare:
                self._touch(bare[0])
            else:
                self._touched.wait(version)

    def _touch(self, page: int) -> None:
        release(map_file(self._fd, PAGE_BYTES, offset=page * PAGE_BYTES), PAGE_BYTES)
        self._has_memory[page] = 1
