"""Physical pages and virtual ranges of the CPU device.

Physical memory is one file in memory (memfd) cut into pages of 2 MiB; a virtual range is address space without access.
Mapping a page anew costs as much as copying it: the kernel fills 512 page-table entries (86-200 µs measured, against
115-130 µs for the copy) and empties them again at unmap (70 µs). So each page's entries are filled once in the life of
the process, at the page's *home*, a mapping of the whole memory at addresses nobody is told. `map` carries the filled
page table from there into the range, `unmap` carries it home, both with mremap, which moves the table as a whole
because everything is aligned to 2 MiB: 0.5 µs a page in long runs, about 10 µs for scattered single pages.

Hence every page is at one place at a time, address space that lost its page has no access from that moment on, and a
touch of it crashes (SIGSEGV) at full speed and in production as it does in tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from aegis.core.ids import PageId
from aegis.device.libc import carry, map_file, release, reserve

PAGE_BYTES = 2 << 20


def runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The longest runs of adjacent pages, as `(index of the first, first page, count)`."""
    start = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1:
            yield start, pages[start], end - start
            start = end


class PhysicalPages:
    """The memory itself. Contents stay when a page moves: what the last user left there, zeros before the first."""

    __slots__ = ("_faulted", "_fd", "_home", "_mapped", "count")

    def __init__(self, count: int) -> None:
        self.count = count
        self._fd = os.memfd_create("aegis-device", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, count * PAGE_BYTES)
        self._home = AddressSpace(count)
        map_file(self._fd, count * PAGE_BYTES, address=self._home.base, populate=False)
        self._faulted = bytearray(count)  # 1: the page's entries are filled
        self._mapped = bytearray(count)  # 1: they are in a range

    def fault_in(self, first: int, count: int) -> None:
        """Takes memory for pages that are home and fills their entries, where that was not done before."""
        if 0 in self._faulted[first : first + count]:
            offset = first * PAGE_BYTES
            map_file(self._fd, count * PAGE_BYTES, offset=offset, address=self._home.base + offset)
            self._faulted[first : first + count] = b"\1" * count

    def send(self, first: int, count: int, address: int) -> None:
        """Maps a run of pages at `address`."""
        assert first >= 0 and first + count <= self.count, f"no pages [{first}, {first + count})"
        assert 1 not in self._mapped[first : first + count], f"pages of [{first}, {first + count}) are mapped already"
        self.fault_in(first, count)
        offset, nbytes = first * PAGE_BYTES, count * PAGE_BYTES
        if not carry(self._home.base + offset, address, nbytes):
            map_file(self._fd, nbytes, offset=offset, address=address)
        self._mapped[first : first + count] = b"\1" * count

    def fetch(self, first: int, count: int, address: int) -> None:
        """Takes a run of pages back from `address`; the caller takes access from there or gives the addresses up."""
        offset, nbytes = first * PAGE_BYTES, count * PAGE_BYTES
        if not carry(address, self._home.base + offset, nbytes):
            map_file(self._fd, nbytes, offset=offset, address=self._home.base + offset, populate=False)
            self._faulted[first : first + count] = bytes(count)
        self._mapped[first : first + count] = bytes(count)

    @property
    def taken_bytes(self) -> int:
        """Memory the operating system has given so far."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Gives all memory back. No range may have a page left."""
        assert 1 not in self._mapped
        self._home.close()
        os.close(self._fd)


class AddressSpace:
    """Reserved addresses, aligned to pages; no access and no memory."""

    __slots__ = ("_nbytes", "_start", "base")

    def __init__(self, pages: int) -> None:
        self._nbytes = (pages + 1) * PAGE_BYTES  # one more, to align
        self._start = reserve(self._nbytes)
        self.base = -(-self._start // PAGE_BYTES) * PAGE_BYTES

    def close(self) -> None:
        release(self._start, self._nbytes)


class CpuRange:
    """A `VirtualRange` over the pages of a CPU device."""

    __slots__ = ("_mapped", "_pages", "_space", "base", "nbytes")

    def __init__(self, nbytes: int, pages: PhysicalPages) -> None:
        count = -(-nbytes // PAGE_BYTES)
        self._space: AddressSpace | None = AddressSpace(count)
        self.base = self._space.base
        self.nbytes = count * PAGE_BYTES
        self._pages = pages
        self._mapped: dict[int, PageId] = {}  # by offset in pages

    def map(self, offset_pages: int, pages: Sequence[PageId]) -> None:
        assert offset_pages >= 0 and (offset_pages + len(pages)) * PAGE_BYTES <= self.nbytes
        offsets = range(offset_pages, offset_pages + len(pages))
        assert self._mapped.keys().isdisjoint(offsets), "there are pages mapped already"
        for index, first, count in runs(pages):
            self._pages.send(first, count, self._address(offset_pages + index))
        self._mapped.update(zip(offsets, pages, strict=True))

    def unmap(self, offset_pages: int, count: int) -> None:
        """Every one of these pages must be mapped."""
        pages = [self._mapped.pop(offset) for offset in range(offset_pages, offset_pages + count)]
        for index, first, length in runs(pages):
            self._pages.fetch(first, length, self._address(offset_pages + index))
        reserve(count * PAGE_BYTES, self._address(offset_pages))

    def close(self) -> None:
        """Unmaps what is mapped and gives the addresses back; a second call does nothing."""
        if self._space is not None:
            for _, offset, count in runs(sorted(self._mapped)):
                self.unmap(offset, count)
            self._space.close()
            self._space = None

    def _address(self, offset_pages: int) -> int:
        return self.base + offset_pages * PAGE_BYTES
