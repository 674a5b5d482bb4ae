"""Pages under random use, and where they are taken from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.errors import LawBroken
from aegis.core.ids import PageRun
from memory.page_runs import RunSet
from memory.pages import NoPages, PagePool, Runs, count_pages

OWNERS = ("kv", "m1", "m2")
PAGES = 24


def runs(*pairs: tuple[int, int]) -> Runs:
    return tuple(PageRun(*pair) for pair in pairs)


def pages_of(held: Runs) -> list[int]:
    return [page for run in held for page in range(run.start, run.stop)]


def runs_of(pages: list[int]) -> Runs:
    return tuple(RunSet(PageRun(page, page + 1) for page in pages))


class Pages(RuleBasedStateMachine):
    """Against the simplest book there is: a dictionary from page to owner, None while it is free."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(runs((0, 12)))
        self.book: dict[int, str | None] = dict.fromkeys(range(12))
        self.clean = set(range(12))
        self.out: list[tuple[Runs, Runs]] = []  # what was deflated

    def free(self) -> int:
        return list(self.book.values()).count(None)

    @rule(owner=st.sampled_from(OWNERS), count=st.integers(1, 26), high=st.booleans())
    def take(self, owner: str, count: int, high: bool) -> None:
        free = self.pool.free
        taken = self.pool.take(owner, count, high=high)
        if isinstance(taken, NoPages):
            assert taken == NoPages(count, free) and count > free
            return
        pages = pages_of(taken)
        assert len(set(pages)) == len(pages) == count == count_pages(taken)
        assert pages == sorted(pages)
        assert all(self.book[page] is None for page in pages), "P2: a page was handed out twice"
        self.book |= dict.fromkeys(pages, owner)
        self.clean -= set(pages)

    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def give(self, data: st.DataObject, owner: str) -> None:
        held = sorted(page for page, name in self.book.items() if name == owner)
        back = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        self.pool.give(owner, runs_of(back))
        self.book |= dict.fromkeys(back)

    @rule(owner=st.sampled_from(OWNERS), to=st.sampled_from(OWNERS))
    def transfer(self, owner: str, to: str) -> None:
        if self.pool.held(to):
            return
        held = [page for page, name in sorted(self.book.items()) if name == owner]
        assert pages_of(self.pool.transfer(owner, to)) == held
        self.book |= dict.fromkeys(held, to)

    @rule(data=st.data())
    def inflate(self, data: st.DataObject) -> None:
        known = {page for out in self.out for part in out for page in pages_of(part)} | self.book.keys()
        strange = sorted(set(range(PAGES)) - known)
        more = data.draw(st.lists(st.sampled_from(strange), unique=True)) if strange else []
        self.pool.inflate(runs_of(more))
        self.book |= dict.fromkeys(more)
        self.clean |= set(more)

    @rule(count=st.integers(0, PAGES))
    def deflate(self, count: int) -> None:
        count, before = min(count, self.free()), set(self.clean)
        clean, dirty = self.pool.deflate(count)
        gone = {*pages_of(clean), *pages_of(dirty)}
        assert len(gone) == count_pages(clean) + count_pages(dirty) == count
        assert set(pages_of(clean)) <= before and not set(pages_of(dirty)) & before
        assert not dirty or before == set(pages_of(clean)), "clean ones first: nobody has to wipe them"
        assert all(self.book.pop(page) is None for page in gone), "only free pages leave"
        self.clean -= gone
        self.out.append((clean, dirty))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if self.out:
            clean, dirty = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            self.pool.restore(clean, dirty)
            self.book |= dict.fromkeys([*pages_of(clean), *pages_of(dirty)])
            self.clean |= set(pages_of(clean))

    @invariant()
    def law_p1_free_and_used_make_the_capacity(self) -> None:
        assert self.pool.free + self.pool.used == self.pool.capacity == len(self.book)
        assert self.pool.free == self.free()

    @invariant()
    def law_p2_a_page_is_in_one_place(self) -> None:
        self.pool.check()
        for owner in OWNERS:
            held = [page for page, name in sorted(self.book.items()) if name == owner]
            assert pages_of(self.pool.runs_of(owner)) == held and self.pool.held(owner) == len(held)

    @invariant()
    def law_p3_clean_pages_are_those_that_nobody_had(self) -> None:
        assert set(pages_of(tuple(self.pool._clean))) == self.clean


TestPages = Pages.TestCase


def test_weights_take_from_the_low_end_and_kv_from_the_high_end() -> None:
    pool = PagePool(runs((0, 10)))
    assert pool.take("m1", 3) == runs((0, 3))
    assert pool.take("kv", 2, high=True) == runs((8, 10))


def test_the_smallest_run_that_fits_is_taken_so_that_long_runs_stay_long() -> None:
    pool = PagePool(runs((0, 10)))
    low = pool.take("m1", 4)
    assert low == runs((0, 4)) and pool.take("m2", 1) == runs((4, 5))
    pool.give("m1", low)
    assert pool.take("m3", 4) == runs((0, 4))


@pytest.mark.parametrize(("high", "expected"), [(False, runs((0, 2))), (True, runs((6, 8)))])
def test_of_runs_of_one_length_the_one_at_the_chosen_end_is_taken(high: bool, expected: Runs) -> None:
    assert PagePool(runs((0, 2), (3, 5), (6, 8))).take("x", 2, high=high) == expected


@pytest.mark.parametrize(("high", "expected"), [(False, runs((0, 2), (3, 4))), (True, runs((4, 5), (6, 8)))])
def test_pieces_come_from_the_chosen_end_when_no_run_is_long_enough(high: bool, expected: Runs) -> None:
    assert PagePool(runs((0, 2), (3, 5), (6, 8))).take("x", 3, high=high) == expected


@given(st.permutations(range(8)))
def test_all_pages_returned_in_any_order_are_one_run_again(order: list[int]) -> None:
    pool = PagePool(runs((0, 8)))
    pool.take("m", 8)
    pool.give("m", [PageRun(page, page + 1) for page in order])
    assert list(pool._free) == [PageRun(0, 8)]


def test_what_leaves_comes_from_short_runs_so_that_long_ones_stay() -> None:
    pool = PagePool(runs((0, 6), (7, 8), (9, 11)))
    assert pool.deflate(4) == (runs((5, 6), (7, 8), (9, 11)), ())
    assert list(pool._free) == [PageRun(0, 5)]


def test_a_page_that_somebody_had_is_clean_no_more() -> None:
    pool = PagePool(runs((0, 4)))
    pool.give("m", pool.take("m", 1))  # type: ignore[arg-type]
    assert pool.deflate(4) == (runs((1, 4)), runs((0, 1)))


def test_what_is_put_back_is_as_clean_as_before() -> None:
    pool = PagePool(runs((0, 4)))
    pool.give("m", pool.take("m", 1))  # type: ignore[arg-type]
    before = pool.deflate(4)
    pool.restore(*before)
    assert pool.deflate(4) == before


def test_a_page_of_another_owner_cannot_be_returned() -> None:
    pool = PagePool(runs((0, 2)))
    pool.take("m1", 1)
    pool.take("m2", 1)
    with pytest.raises(AssertionError, match="is not in the set"):
        pool.give("m2", runs((0, 1)))
    with pytest.raises(KeyError):
        pool.give("nobody", runs((0, 1)))


def test_who_holds_pages_is_not_given_anothers() -> None:
    pool = PagePool(runs((0, 2)))
    pool.take("m1", 1)
    pool.take("m2", 1)
    with pytest.raises(AssertionError):
        pool.transfer("m1", "m2")


@pytest.mark.parametrize("law", ["P1", "P2", "P2 of two owners", "P3"])
def test_check_finds_what_is_broken(law: str) -> None:
    pool = PagePool(runs((0, 4)))
    pool.take("m", 1)
    match law:
        case "P1":
            pool.used = 2
        case "P2":
            pool._free.add(PageRun(0, 1))
        case "P2 of two owners":
            pool._used["x"] = RunSet(runs((0, 1)))
            pool.used += 1
        case "P3":
            pool._clean.add(PageRun(0, 1))
    with pytest.raises(LawBroken, match=law[:2]):
        pool.check()
