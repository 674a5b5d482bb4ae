"""Sets of pages as runs, beside plain sets of pages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.errors import LawBroken
from aegis.core.ids import PageRun
from memory.page_runs import RunSet

PAGES = 24


def pages_of(run: PageRun) -> set[int]:
    return set(range(run.start, run.stop))


@st.composite
def some_run(draw: st.DrawFn) -> PageRun:
    start = draw(st.integers(0, PAGES - 1))
    return PageRun(start, draw(st.integers(start + 1, PAGES)))


class Runs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runs = RunSet()
        self.book: set[int] = set()

    @rule(run=some_run())
    def add(self, run: PageRun) -> None:
        if not self.book & pages_of(run):
            self.runs.add(run)
            self.book |= pages_of(run)

    @rule(run=some_run())
    def remove(self, run: PageRun) -> None:
        if pages_of(run) <= self.book:
            self.runs.remove(run)
            self.book -= pages_of(run)

    @rule(run=some_run())
    def ask(self, run: PageRun) -> None:
        found = self.runs.intersection(run)
        assert (run in self.runs) == (pages_of(run) <= self.book)
        assert [page for part in found for page in sorted(pages_of(part))] == sorted(self.book & pages_of(run))

    @invariant()
    def it_is_the_set(self) -> None:
        assert set().union(*map(pages_of, self.runs)) == self.book
        assert self.runs.count == len(self.book) and bool(self.runs) == bool(self.book)

    @invariant()
    def law_u1_runs_are_sorted_and_apart(self) -> None:
        self.runs.check()
        assert all(a.stop < b.start for a, b in pairwise(self.runs)) and all(run.pages > 0 for run in self.runs)
        assert len(self.runs) == sum(page - 1 not in self.book for page in self.book)


TestRuns = Runs.TestCase


@given(st.permutations(range(10)))
def test_pages_that_come_in_any_order_are_one_run(order: list[int]) -> None:
    assert list(RunSet(PageRun(page, page + 1) for page in order)) == [PageRun(0, 10)]


@pytest.mark.parametrize("run", [(0, 1), (2, 3), (3, 5), (4, 5), (5, 6), (4, 6), (5, 9), (1, 9), (8, 9)])
def test_a_page_cannot_be_added_twice(run: tuple[int, int]) -> None:
    runs = RunSet([PageRun(0, 2), PageRun(2, 3), PageRun(4, 6), PageRun(8, 10)])
    with pytest.raises(AssertionError, match="in the set already"):
        runs.add(PageRun(*run))


@pytest.mark.parametrize("run", [(2, 3), (1, 5), (3, 5), (5, 7), (6, 7), (0, 6)])
def test_what_is_not_there_cannot_be_removed(run: tuple[int, int]) -> None:
    runs = RunSet([PageRun(0, 2), PageRun(4, 6)])
    with pytest.raises(AssertionError, match="is not in the set"):
        runs.remove(PageRun(*run))


def test_there_is_no_empty_run() -> None:
    with pytest.raises(AssertionError):
        RunSet([PageRun(3, 3)])


@pytest.mark.parametrize(
    "runs", [[(0, 0)], [(4, 5), (0, 1)], [(0, 2), (2, 3)], [(0, 3), (2, 4)]], ids=["empty", "order", "touch", "overlap"]
)
def test_check_finds_what_is_broken(runs: list[tuple[int, int]]) -> None:
    broken = RunSet()
    broken._starts, broken._stops = [start for start, _ in runs], [stop for _, stop in runs]
    broken.count = sum(stop - start for start, stop in runs)
    with pytest.raises(LawBroken, match="U1"):
        broken.check()


def test_check_finds_a_wrong_count() -> None:
    broken = RunSet([PageRun(0, 2)])
    broken.count = 3
    with pytest.raises(LawBroken, match="U1: the count"):
        broken.check()
