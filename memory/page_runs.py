"""Sets of pages as sorted, merged, half-open runs: adjacent pages are mapped, wiped and sent in one go.

Law (U1): runs are not empty, sorted, disjoint and not adjacent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise

from aegis.core.errors import LawBroken
from aegis.core.ids import PageRun


class RunSet:
    """A mutable set of pages. Costs grow with the number of runs, not of pages."""

    __slots__ = ("_starts", "_stops", "count")

    def __init__(self, runs: Iterable[PageRun] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.count = 0  # pages
        for run in runs:
            self.add(run)

    def __iter__(self) -> Iterator[PageRun]:
        return map(PageRun, self._starts, self._stops)

    def bounds(self) -> Iterable[tuple[int, int]]:
        """The starts and stops of its runs."""
        return zip(self._starts, self._stops, strict=True)

    def __len__(self) -> int:
        """The number of runs."""
        return len(self._starts)

    def __bool__(self) -> bool:
        return self.count > 0

    def __contains__(self, run: PageRun) -> bool:
        """Whether all its pages are in the set."""
        at = self._at(run.start)
        return at >= 0 and run.stop <= self._stops[at]

    def add(self, run: PageRun) -> None:
        """None of its pages may be in the set."""
        start, stop = run
        assert start < stop
        starts, stops, at = self._starts, self._stops, self._at(start)
        after = at + 1
        assert at < 0 or stops[at] <= start, f"{run} is in the set already"
        assert after == len(starts) or starts[after] >= stop, f"{run} is in the set already"
        self.count += stop - start
        goes_on = after < len(starts) and starts[after] == stop
        if at >= 0 and stops[at] == start:
            stops[at] = stops.pop(after) if goes_on else stop
            if goes_on:
                del starts[after]
        elif goes_on:
            starts[after] = start
        else:
            starts.insert(after, start)
            stops.insert(after, stop)

    def remove(self, run: PageRun) -> None:
        """All its pages must be in the set."""
        first, end = run
        starts, stops, at = self._starts, self._stops, self._at(first)
        assert at >= 0 and end <= stops[at], f"{run} is not in the set"
        start, stop = starts[at], stops[at]
        self.count -= end - first
        if start < first:
            stops[at] = first
            if end < stop:
                starts.insert(at + 1, end)
                stops.insert(at + 1, stop)
        elif end < stop:
            starts[at] = end
        else:
            del starts[at], stops[at]

    def intersection(self, run: PageRun) -> list[PageRun]:
        """The part of the run that is in the set."""
        found: list[PageRun] = []
        for at in range(max(self._at(run.start), 0), len(self._starts)):
            start, stop = max(self._starts[at], run.start), min(self._stops[at], run.stop)
            if self._starts[at] >= run.stop:
                break
            if start < stop:
                found.append(PageRun(start, stop))
        return found

    def check(self) -> None:
        """Raises LawBroken if the law does not hold."""
        runs = list(self)
        if any(start >= stop for start, stop in runs) or any(a.stop >= b.start for a, b in pairwise(runs)):
            raise LawBroken("U1: runs are empty, out of order, or touch")
        if sum(run.pages for run in runs) != self.count:
            raise LawBroken("U1: the count of pages is off")

    def _at(self, page: int) -> int:
        """The index of the last run that starts at or before the page, -1 if there is none."""
        return bisect_right(self._starts, page) - 1
