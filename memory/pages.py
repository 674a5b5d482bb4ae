"""Counting physical memory: a pool of fixed extents, each free or owned by exactly one holder.

The owner of a device's accounts keeps one for all its pages, whose holders are instances; an instance keeps one for
the pages it was granted, whose holders are models and KV. Pages come and go: a pool is inflated and deflated.

Laws: (P1) free + used == capacity; (P2) no page is in two places; (P3) what counts as clean is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct

from aegis.core.errors import LawBroken
from aegis.core.ids import PageRun
from memory.page_runs import RunSet

Runs = tuple[PageRun, ...]


def count_pages(runs: Iterable[PageRun]) -> int:
    return sum(stop - start for start, stop in runs)


class NoPages(Struct, frozen=True):
    """A refusal: so many pages were wanted, so few are free. It is a `Struct`, which is made faster than a dataclass,
    because most attempts to look ahead end in one."""

    wanted: int
    free: int


class PagePool:
    """Hands out pages as few, long runs, so that mapping them takes few calls.

    Weights take from the low end and KV slabs from the high end, which keeps the long runs long. Pages are clean from
    the moment they are added until they are taken for the first time.
    """

    __slots__ = ("_clean", "_free", "_used", "used")

    def __init__(self, runs: Iterable[PageRun] = ()) -> None:
        self._free = RunSet()
        self._clean = RunSet()
        self._used: dict[str, RunSet] = {}
        self.used = 0
        self.inflate(runs)

    @property
    def capacity(self) -> int:
        return self._free.count + self.used

    @property
    def free(self) -> int:
        return self._free.count

    def take(self, owner: str, count: int, *, high: bool = False) -> Runs | NoPages:
        """`count` pages: a part of the shortest run that holds them all, else pieces from the chosen end."""
        assert count > 0
        if count > self._free.count:
            return NoPages(count, self._free.count)
        taken = self._fit(count, high) or self._pieces(count, high)
        held = self._used.get(owner)
        if held is None:
            held = self._used[owner] = RunSet()
        for run in taken:
            self._free.remove(run)
            held.add(run)
            for clean in self._clean.intersection(run) if self._clean.count else ():
                self._clean.remove(clean)
        self.used += count
        return taken

    def give(self, owner: str, runs: Sequence[PageRun]) -> None:
        """Returns pages; each must be the owner's."""
        if not runs:
            return
        held = self._used[owner]
        for run in runs:
            held.remove(run)
            self._free.add(run)
            self.used -= run.stop - run.start
        if not held:
            del self._used[owner]

    def transfer(self, owner: str, to: str) -> Runs:
        """Passes all pages of an owner to another, which held none; returns them."""
        assert to not in self._used
        runs = self._used.pop(owner, None)
        if runs:
            self._used[to] = runs
        return tuple(runs or ())

    def held(self, owner: str) -> int:
        runs = self._used.get(owner)
        return runs.count if runs else 0

    def runs_of(self, owner: str) -> Runs:
        return tuple(self._used.get(owner, ()))

    def inflate(self, runs: Iterable[PageRun]) -> None:
        """Adds free pages, which are clean."""
        for run in runs:
            self._free.add(run)
            self._clean.add(run)

    def deflate(self, count: int) -> tuple[Runs, Runs]:
        """Takes `count` free pages out of the pool, clean ones first: the clean ones, and the others."""
        assert count <= self._free.count
        clean = _first(self._clean, count)
        for run in clean:
            self._clean.remove(run)
            self._free.remove(run)
        dirty = _first(self._free, count - count_pages(clean))
        for run in dirty:
            self._free.remove(run)
        return clean, dirty

    def restore(self, clean: Runs, dirty: Runs) -> None:
        """Puts back what `deflate` took."""
        self.inflate(clean)
        for run in dirty:
            self._free.add(run)

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        used = list(self._used.values())
        for runs in (self._free, self._clean, *used):
            runs.check()
        if sum(runs.count for runs in used) != self.used:
            raise LawBroken(f"P1: {sum(runs.count for runs in used)} pages have an owner, {self.used} are used")
        every = sorted(run for runs in (self._free, *used) for run in runs)
        for before, run in pairwise(every):
            if before.stop > run.start:
                raise LawBroken(f"P2: a page of {run} is in two places")
        if any(run not in self._free for run in self._clean):
            raise LawBroken("P3: a clean page is not free")

    def _fit(self, count: int, high: bool) -> Runs:
        best, first, end = 0, 0, 0
        for start, stop in self._free.bounds():
            size = stop - start
            if size >= count and (not best or size < best or (high and size == best)):
                best, first, end = size, start, stop
        if not best:
            return ()
        return (PageRun(end - count, end) if high else PageRun(first, first + count),)

    def _pieces(self, count: int, high: bool) -> Runs:
        picked: list[PageRun] = []
        for start, stop in reversed(list(self._free)) if high else self._free:
            size = min(stop - start, count)
            picked.append(PageRun(stop - size, stop) if high else PageRun(start, start + size))
            count -= size
            if not count:
                break
        return tuple(sorted(picked))


def _first(runs: Iterable[PageRun], count: int) -> Runs:
    """`count` pages, or all there are, of short runs before long ones, so that the rest is in long runs."""
    picked: list[PageRun] = []
    for start, stop in sorted(runs, key=lambda run: (run.stop - run.start, run.start)):
        if not count:
            break
        size = min(stop - start, count)
        picked.append(PageRun(stop - size, stop))
        count -= size
    return tuple(sorted(picked))
