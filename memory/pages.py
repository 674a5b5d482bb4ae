"""Counting a device's physical memory: a pool of fixed extents, each free or owned by exactly one holder.

Laws: (P1) free + used == capacity; (P2) no page has two owners; (P3) the free runs are disjoint, sorted and merged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from aegis.core.errors import LawBroken
from aegis.core.ids import PageId


@dataclass(frozen=True, slots=True)
class NoPages:
    """A refusal: so many pages were wanted, so few are free."""

    wanted: int
    free: int


class PagePool:
    """Hands out pages as few, long runs, so that mapping them takes few calls.

    Weights take from the low end and KV slabs from the high end, which keeps the long runs long.
    """

    __slots__ = ("_owners", "_runs", "capacity")

    def __init__(self, capacity: int) -> None:
        assert capacity >= 0
        self.capacity = capacity
        self._runs: list[tuple[int, int]] = [(0, capacity)] if capacity else []  # free, half-open, sorted
        self._owners: dict[PageId, str] = {}

    @property
    def free(self) -> int:
        return self.capacity - len(self._owners)

    @property
    def used(self) -> int:
        return len(self._owners)

    def take(self, owner: str, count: int, *, high: bool = False) -> tuple[PageId, ...] | NoPages:
        """`count` pages: the smallest run that holds them all, else pieces from the chosen end."""
        if count > self.free:
            return NoPages(count, self.free)
        fitting = [(end - start, start) for start, end in self._runs if end - start >= count]
        if fitting:
            length, start = min(fitting, key=lambda x: (x[0], -x[1] if high else x[1]))
            first = start + length - count if high else start
            return self._grant(owner, range(first, first + count))
        order = reversed(self._runs) if high else iter(self._runs)
        picked: list[int] = []
        for start, end in order:
            size = min(end - start, count - len(picked))
            picked += range(end - size, end) if high else range(start, start + size)
            if len(picked) == count:
                break
        return self._grant(owner, sorted(picked))

    def give(self, owner: str, pages: Iterable[PageId]) -> None:
        """Returns pages; each must be the owner's."""
        for page in pages:
            assert self._owners.get(page) == owner, f"page {page} is {self._owners.get(page)}'s, not {owner}'s"
            del self._owners[page]
            self._insert(page)

    def owner(self, page: PageId) -> str | None:
        return self._owners.get(page)

    def check(self) -> None:
        """Raises LawBroken where a law does not hold."""
        free = {page for start, end in self._runs for page in range(start, end)}
        if len(free) + len(self._owners) != self.capacity:
            raise LawBroken(f"P1: {len(free)} free + {len(self._owners)} used != {self.capacity}")
        if free & self._owners.keys():
            raise LawBroken("P2: a page is free and owned")
        if any(a[1] >= b[0] for a, b in pairwise(self._runs)):
            raise LawBroken("P3: free runs touch or overlap")

    def _grant(self, owner: str, pages: Iterable[int]) -> tuple[PageId, ...]:
        granted = tuple(PageId(page) for page in pages)
        for page in granted:
            assert page not in self._owners
            self._owners[page] = owner
            self._cut(page)
        return granted

    def _cut(self, page: PageId) -> None:
        at = bisect_left(self._runs, (page + 1,)) - 1
        start, end = self._runs[at]
        assert start <= page < end
        self._runs[at : at + 1] = [run for run in ((start, page), (page + 1, end)) if run[0] < run[1]]

    def _insert(self, page: PageId) -> None:
        at = bisect_left(self._runs, (page,))
        start, end = int(page), page + 1
        if at < len(self._runs) and self._runs[at][0] == end:
            end = self._runs.pop(at)[1]
        if at > 0 and self._runs[at - 1][1] == start:
            at -= 1
            start = self._runs.pop(at)[0]
        self._runs.insert(at, (start, end))
