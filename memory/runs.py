"""Sets of pages as sorted, merged, half-open runs: what is adjacent is mapped, wiped and sent in one go.

Law (U1): runs are not empty, sorted, disjoint and not adjacent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import pairwise

from aegis.core.errors import LawBroken
from aegis.core.ids import PageRun


class RunSet:
    """A mutable set of pages. Costs grow with the number of runs, not of pages."""

    __slots__ = ("_runs", "count")

    def __init__(self, runs: Iterable[PageRun] = ()) -> None:
        self._runs: list[PageRun] = []
        self.count = 0  # pages
        for run in runs:
            self.add(run)

    def __iter__(self) -> Iterator[PageRun]:
        return iter(self._runs)

    def __len__(self) -> int:
        """How many runs."""
        return len(self._runs)

    def __bool__(self) -> bool:
        return self.count > 0

    def __contains__(self, run: PageRun) -> bool:
        """Whether all its pages are in the set."""
        at = self._at(run.start)
        return at >= 0 and run.stop <= self._runs[at].stop

    def add(self, run: PageRun) -> None:
        """None of its pages may be in the set."""
        start, stop = run
        assert start < stop
        runs, at = self._runs, self._at(start)
        self.count += stop - start
        before = after = at + 1
        if at >= 0 and runs[at].stop >= start:
            assert runs[at].stop == start, f"{run} is in the set already"
            before, start = at, runs[at].start
        if after < len(runs) and runs[after].start <= stop:
            assert runs[after].start == stop, f"{run} is in the set already"
            after, stop = after + 1, runs[after].stop
        runs[before:after] = [PageRun(start, stop)]

    def remove(self, run: PageRun) -> None:
        """All its pages must be in the set."""
        at = self._at(run.start)
        assert at >= 0 and run.stop <= self._runs[at].stop, f"{run} is not in the set"
        start, stop = self._runs[at]
        left = [PageRun(start, run.start)] if start < run.start else []
        if run.stop < stop:
            left.append(PageRun(run.stop, stop))
        self._runs[at : at + 1] = left
        self.count -= run.stop - run.start

    def intersection(self, run: PageRun) -> list[PageRun]:
        """What of the run is in the set."""
        found, runs = [], self._runs
        for at in range(max(self._at(run.start), 0), len(runs)):
            start, stop = runs[at]
            if start >= run.stop:
                break
            if stop > run.start:
                found.append(PageRun(max(start, run.start), min(stop, run.stop)))
        return found

    def check(self) -> None:
        """Raises LawBroken where the law does not hold."""
        if any(start >= stop for start, stop in self._runs) or any(a.stop >= b.start for a, b in pairwise(self._runs)):
            raise LawBroken("U1: runs are empty, out of order, or touch")
        if sum(run.pages for run in self._runs) != self.count:
            raise LawBroken("U1: the count of pages is off")

    def _at(self, page: int) -> int:
        """The index of the last run that starts at or before the page, -1 if there is none."""
        return bisect_left(self._runs, (page + 1,)) - 1
