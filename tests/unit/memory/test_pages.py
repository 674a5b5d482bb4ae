"""Pages under random use, and where they are taken from."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.errors import LawBroken
from aegis.core.ids import PageId
from memory.pages import NoPages, PagePool

OWNERS = ("kv", "m1", "m2")


class Pages(RuleBasedStateMachine):
    """Against the simplest book there is: a dictionary from page to owner."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(24)
        self.book: dict[PageId, str] = {}

    @rule(owner=st.sampled_from(OWNERS), count=st.integers(0, 26), high=st.booleans())
    def take(self, owner: str, count: int, high: bool) -> None:
        free = self.pool.free
        pages = self.pool.take(owner, count, high=high)
        if isinstance(pages, NoPages):
            assert pages == NoPages(count, free) and count > free
            return
        assert len(set(pages)) == len(pages) == count
        assert list(pages) == sorted(pages)
        assert not self.book.keys() & set(pages), "P2: a page was handed out twice"
        self.book |= dict.fromkeys(pages, owner)

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def give(self, data: st.DataObject, owner: str) -> None:
        held = sorted(page for page, name in self.book.items() if name == owner)
        back = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        self.pool.give(owner, back)
        for page in back:
            del self.book[page]

    @invariant()
    def law_p1_free_and_used_make_the_capacity(self) -> None:
        assert self.pool.free + self.pool.used == self.pool.capacity == 24
        assert self.pool.used == len(self.book)

    @invariant()
    def law_p2_a_page_has_one_owner(self) -> None:
        assert {page: self.pool.owner(PageId(page)) for page in range(24)} == {
            page: self.book.get(PageId(page)) for page in range(24)
        }

    @invariant()
    def law_p3_free_runs_are_merged(self) -> None:
        self.pool.check()
        assert all(end < start for (_, end), (start, _) in pairwise(self.pool._runs))


TestPages = Pages.TestCase


def test_weights_take_from_the_low_end_and_kv_from_the_high_end() -> None:
    pool = PagePool(10)
    assert pool.take("m1", 3) == (0, 1, 2)
    assert pool.take("kv", 2, high=True) == (8, 9)


def test_the_smallest_run_that_fits_is_taken_so_that_long_runs_stay_long() -> None:
    pool = PagePool(10)
    low = pool.take("m1", 4)
    assert low == (0, 1, 2, 3) and pool.take("m2", 1) == (4,)
    pool.give("m1", low)
    assert pool.take("m3", 4) == (0, 1, 2, 3)


@pytest.mark.parametrize(("high", "expected"), [(False, (0, 1, 3)), (True, (3, 4, 6))])
def test_pieces_come_from_the_chosen_end_when_no_run_is_long_enough(high: bool, expected: tuple[int, ...]) -> None:
    pool = PagePool(7)
    pool.take("m", 7)
    pool.give("m", [PageId(page) for page in (0, 1, 3, 4, 6)])
    assert pool.take("x", 3, high=high) == expected


@given(st.permutations(range(8)))
def test_all_pages_returned_in_any_order_are_one_run_again(order: list[int]) -> None:
    pool = PagePool(8)
    pool.take("m", 8)
    pool.give("m", [PageId(page) for page in order])
    assert pool._runs == [(0, 8)]


def test_a_page_of_another_owner_cannot_be_returned() -> None:
    pool = PagePool(2)
    pool.take("m1", 1)
    with pytest.raises(AssertionError, match="m1's, not m2's"):
        pool.give("m2", [PageId(0)])


@pytest.mark.parametrize(
    ("law", "runs"), [("P1", [(0, 1)]), ("P2", [(0, 2), (3, 4)]), ("P3", [(1, 2), (2, 4)]), ("P3", [(2, 4), (1, 2)])]
)
def test_check_finds_what_is_broken(law: str, runs: list[tuple[int, int]]) -> None:
    pool = PagePool(4)
    pool.take("m", 1)
    pool._runs = runs
    with pytest.raises(LawBroken, match=law):
        pool.check()
