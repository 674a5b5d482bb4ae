"""Virtual ranges of the CPU device: reserved address space with physical pages carried into it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from aegis.core.ids import PageRun
from aegis.device.cpu.libc import reserve
from aegis.device.cpu.pages import AddressSpace, PhysicalPages
from aegis.device.cpu.pool import PAGE_BYTES

_Piece = tuple[int, int, int]
"""Offsets `[start, stop)` in the range, in pages, and the first of the adjacent physical pages there."""


class CpuRange:
    """A `VirtualRange` over the pages of a CPU device."""

    __slots__ = ("_pages", "_pieces", "_space", "base", "nbytes")

    def __init__(self, nbytes: int, pages: PhysicalPages) -> None:
        count = -(-nbytes // PAGE_BYTES)
        self._space: AddressSpace | None = AddressSpace(count)
        self.base = self._space.base
        self.nbytes = count * PAGE_BYTES
        self._pages = pages
        self._pieces: list[_Piece] = []  # sorted

    def map(self, offset_pages: int, runs: Sequence[PageRun]) -> None:
        at = bisect_right(self._pieces, (offset_pages + 1,))
        assert at == 0 or self._pieces[at - 1][1] <= offset_pages, "there are pages mapped already"
        added, end = list[_Piece](), offset_pages
        for start, stop in runs:
            offset, end = end, end + stop - start
            added.append((offset, end, start))
        assert offset_pages >= 0 and end * PAGE_BYTES <= self.nbytes, "beyond the range"
        assert at == len(self._pieces) or end <= self._pieces[at][0], "there are pages mapped already"
        with self._pages.lock:
            for offset, stop, page in added:
                self._pages.send(page, page + stop - offset, self.base + offset * PAGE_BYTES)
        self._pieces[at:at] = added

    def unmap(self, offset_pages: int, count: int) -> None:
        """Every one of these pages must be mapped."""
        end, address = offset_pages + count, self.base + offset_pages * PAGE_BYTES
        with self._pages.lock:
            for page, length in self._cut(offset_pages, end):
                self._pages.fetch(page, page + length, address)
                address += length * PAGE_BYTES
        reserve(count * PAGE_BYTES, self.base + offset_pages * PAGE_BYTES)

    def close(self) -> None:
        """Unmaps what is mapped and gives the addresses back; a second call does nothing."""
        if self._space is not None:
            for start, stop, _ in tuple(self._pieces):
                self.unmap(start, stop - start)
            self._space.close()
            self._space = None

    def _cut(self, start: int, end: int) -> list[tuple[int, int]]:
        """Takes `[start, end)` out of the pieces: as `(first page, count)`, in order of offset."""
        pieces, first = self._pieces, bisect_right(self._pieces, (start + 1,)) - 1
        at, last, found, left = start, first, [], list[_Piece]()
        assert first >= 0, f"no page at {start}"
        while at < end:
            assert last < len(pieces) and pieces[last][0] <= at < pieces[last][1], f"no page at {at}"
            lower, upper, page = pieces[last]
            stop = min(end, upper)
            found.append((page + at - lower, stop - at))
            if lower < at:
                left.append((lower, at, page))
            if stop < upper:
                left.append((stop, upper, page + stop - lower))
            at, last = stop, last + 1
        pieces[first:last] = left
        return found
