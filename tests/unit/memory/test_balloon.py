"""An instance's pages as they come and are taken back: the protocol step by step, and under random use."""

from __future__ import annotations

from itertools import zip_longest

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aegis.core.effects import AcceptPages, Effect, RevokePages, Send, StreamName, WipePages
from aegis.core.errors import LawBroken
from aegis.core.ids import PageRun
from aegis.core.messages import GaveBack, GrantPages, NeedPages, TakeBack
from memory.balloon import Balloon, Wish
from memory.pages import NoPages, PagePool, Runs
from memory.transfers import Transfers

WORDS = {name: i for i, name in enumerate(StreamName)}
PAGES, PATIENCE_NS = 16, 40
REFUSED = GrantPages((), refused=True)
EXCESSIVE = GrantPages((), refused=True, excessive=True)


def runs(*pairs: tuple[int, int]) -> Runs:
    return tuple(PageRun(*pair) for pair in pairs)


def pages_of(held: Runs) -> set[int]:
    return {page for run in held for page in range(run.start, run.stop)}


class Held:
    """A balloon with all it stands on, and what it has asked for since the last look."""

    def __init__(self, pages: int = 0) -> None:
        self.effects: list[Effect] = []
        self.pool = PagePool()
        self.transfers = Transfers(WORDS)
        self.balloon = Balloon(self.pool, self.transfers, self.effects)
        if pages:
            self.balloon.granted(GrantPages(runs((0, pages))))
            self.look()

    def look(self) -> list[Effect]:
        effects = list(self.effects)
        self.effects.clear()
        self.balloon.check()
        self.pool.check()
        return effects

    def use(self, count: int) -> Runs:
        taken = self.pool.take("m", count)
        assert not isinstance(taken, NoPages)
        return taken

    def take_back(self, ticket: int, pages: int, *, now_ns: int = 0, settle: bool = True) -> list[Effect]:
        self.balloon.take_back(TakeBack(ticket, pages, PATIENCE_NS), now_ns)
        if settle:
            self.balloon.settle(now_ns)
        return self.look()

    def trim(self, ticket: int, pages: int, *, keep: int = 0) -> list[Effect]:
        self.balloon.take_back(TakeBack(ticket, pages, PATIENCE_NS, gentle=True, keep=keep), 0)
        return self.look()

    def wiped(self, value: int) -> list[Effect]:
        self.transfers.progress(StreamName.SCRUB, value)
        self.balloon.progress()
        return self.look()


# --- under random use -------------------------------------------------------------------------------------------------


class Shares(RuleBasedStateMachine):
    """Beside sets of pages: whose they are, which are in use, which hold bytes, which are on their way out."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Held()
        self.ours: set[int] = set()
        self.used: list[Runs] = []
        self.written: set[int] = set()
        self.leaving: set[int] = set()  # being wiped
        self.wipes: list[set[int]] = []  # in order of their events, from the first that has not passed
        self.wiped = self.ticket = self.now_ns = self.since_ns = 0
        self.open: dict[int, int | None] = {}  # unanswered tickets: how many pages, None for a trim

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        strange = sorted(set(range(PAGES)) - self.ours)
        more = data.draw(st.lists(st.sampled_from(strange), unique=True, min_size=1)) if strange else []
        self.held.balloon.granted(GrantPages(tuple(PageRun(page, page + 1) for page in more)))
        self.ours |= set(more)
        assert [pages_of(e.runs) for e in self.held.look() if isinstance(e, AcceptPages)] == [set(more)]

    @rule(count=st.integers(1, 6))
    def use(self, count: int) -> None:
        taken = self.held.pool.take("m", count)
        if not isinstance(taken, NoPages):
            self.used.append(taken)
            self.written |= pages_of(taken)

    @rule(data=st.data())
    def leave_alone(self, data: st.DataObject) -> None:
        if self.used:
            self.held.pool.give("m", self.used.pop(data.draw(st.integers(0, len(self.used) - 1))))

    @precondition(lambda self: not self.held.balloon.owes and self.ours - self.leaving)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        self.ticket += 1
        pages = self.open[self.ticket] = data.draw(st.integers(1, len(self.ours - self.leaving)))
        self.since_ns = self.now_ns
        assert self.held.take_back(self.ticket, pages, now_ns=self.now_ns, settle=False) == []

    @rule(pages=st.integers(0, PAGES), keep=st.integers(0, PAGES))
    def trim(self, pages: int, keep: int) -> None:
        self.ticket += 1
        self.open[self.ticket] = None
        free = self.held.pool.free
        most = max(min(free, pages, len(self.ours) - keep), 0)
        self.listen(self.held.trim(self.ticket, pages, keep=keep))
        assert self.held.pool.free == free - most

    @rule(ns=st.integers(0, PATIENCE_NS // 2))
    def time_passes(self, ns: int) -> None:
        self.now_ns += ns
        self.held.balloon.settle(self.now_ns)
        self.listen(self.held.look())
        assert not self.held.balloon.owes or self.now_ns < self.since_ns + PATIENCE_NS, "answered in time"

    @precondition(lambda self: self.wipes)
    @rule()
    def a_wipe_ends(self) -> None:
        self.wiped += 1
        self.written -= self.wipes.pop(0)
        self.listen(self.held.wiped(self.wiped))

    def listen(self, effects: list[Effect]) -> None:
        for effect, after in zip_longest(effects, effects[1:]):
            match effect:
                case WipePages(dirty):
                    assert pages_of(dirty) <= self.written, "clean pages need no wipe"
                    self.wipes.append(pages_of(dirty))
                    self.leaving |= pages_of(dirty)
                case RevokePages(gone):
                    assert isinstance(after, Send) and isinstance(after.message, GaveBack)
                    assert after.message.runs == gone, "what is acknowledged has just been let go of"
                    self.revoked(pages_of(gone))
                case Send(GaveBack() as answer):
                    self.answered(answer)

    def revoked(self, gone: set[int]) -> None:
        assert gone <= self.ours - set().union(*map(pages_of, self.used))
        assert not gone & self.written, "wiped before it is acknowledged"
        self.ours -= gone
        self.leaving -= gone

    def answered(self, answer: GaveBack) -> None:
        pages = self.open.pop(answer.ticket)  # once
        if pages is None:
            assert not answer.refused
        else:
            assert len(pages_of(answer.runs)) == (0 if answer.refused else pages), "all or none"
            assert answer.spare < pages

    @invariant()
    def what_runs_yields_in_time(self) -> None:
        balloon, late = self.held.balloon, self.now_ns >= self.since_ns + PATIENCE_NS // 4
        assert balloon.must_yield(self.now_ns) == (balloon.short > 0 and late)

    @invariant()
    def law_v1_pages_are_in_the_pool_retired_or_leaving(self) -> None:
        balloon, pool = self.held.balloon, self.held.pool
        balloon.check()
        assert balloon.held == len(self.ours)
        used = set().union(*map(pages_of, self.used))
        assert pool.used == len(used) and not used & self.leaving, "V2: what leaves is in no range"
        assert pool.free + balloon.retired + balloon.leaving == len(self.ours - used)
        assert not pages_of(tuple(pool._free)) & self.leaving

    def teardown(self) -> None:
        """Everything can be had back: what is in use is given up, every wipe ends."""
        while self.used:
            self.held.pool.give("m", self.used.pop())
        self.time_passes(PATIENCE_NS)
        while self.wipes:
            self.a_wipe_ends()
        assert not self.open and self.held.balloon.leaving == self.held.balloon.retired == 0
        assert self.held.pool.free == len(self.ours), "a refused taking left everything in the pool"
        assert pages_of(tuple(self.held.pool._clean)) == self.ours - self.written
        self.trim(PAGES, 0)
        while self.wipes:
            self.a_wipe_ends()
        assert not self.ours and not self.held.balloon.held


Shares.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestShares = Shares.TestCase


# --- taking back ------------------------------------------------------------------------------------------------------


def test_retired_pages_are_not_handed_out() -> None:
    held = Held(6)
    held.use(4)
    assert held.take_back(1, 5) == [] and (held.balloon.retired, held.balloon.short) == (2, 3)
    assert held.pool.take("other", 1) == NoPages(1, 0)


def test_what_becomes_free_is_retired_until_all_is_there() -> None:
    held = Held(6)
    used = held.use(6)
    held.take_back(1, 3)
    for count, run in enumerate([PageRun(0, 1), PageRun(3, 4)], start=1):
        held.pool.give("m", (run,))
        held.balloon.settle(1)
        assert held.look() == [] and held.balloon.retired == count
    held.pool.give("m", (PageRun(5, 6),))
    held.balloon.settle(1)
    (wipe,) = held.look()
    assert isinstance(wipe, WipePages) and pages_of(wipe.runs) == {0, 3, 5} < pages_of(used)
    assert not held.balloon.owes


def test_clean_pages_need_no_wipe() -> None:
    assert Held(6).take_back(1, 4) == [RevokePages(runs((2, 6))), Send(GaveBack(1, runs((2, 6))))]


def test_written_pages_are_wiped_before_they_are_acknowledged() -> None:
    held = Held(6)
    held.pool.give("m", held.use(6))
    (wipe,) = held.take_back(1, 4)
    assert isinstance(wipe, WipePages)
    assert (held.balloon.held, held.balloon.leaving, held.balloon.owes) == (6, 4, False)
    assert held.wiped(wipe.event.value) == [RevokePages(wipe.runs), Send(GaveBack(1, wipe.runs))]
    assert (held.balloon.held, held.balloon.leaving) == (2, 0)


def test_clean_pages_wait_for_the_written_ones_they_leave_with() -> None:
    held = Held(4)
    held.pool.give("m", held.use(1))
    (wipe,) = held.take_back(1, 4)
    assert isinstance(wipe, WipePages) and wipe.runs == runs((0, 1))
    _, told = held.wiped(1)
    assert isinstance(told, Send) and isinstance(told.message, GaveBack) and pages_of(told.message.runs) == {0, 1, 2, 3}


def test_a_wipe_that_has_not_ended_acknowledges_nothing() -> None:
    held = Held(4)
    held.pool.give("m", held.use(4))
    held.trim(1, 1)
    held.trim(2, 1)
    assert [type(effect) for effect in held.wiped(1)] == [RevokePages, Send]
    assert held.balloon.leaving == 1
    assert held.wiped(2)[-1] == Send(GaveBack(2, runs((2, 3))))


def test_what_comes_too_late_leaves_everything_as_it_was() -> None:
    held = Held(6)
    held.pool.give("m", held.use(1))
    held.use(2)  # of those that nobody had
    clean, free = list(held.pool._clean), list(held.pool._free)
    held.take_back(7, 6)
    held.balloon.settle(PATIENCE_NS - 1)
    assert held.look() == [] and held.balloon.retired == 4
    held.balloon.settle(PATIENCE_NS)
    assert held.look() == [Send(GaveBack(7, (), refused=True, spare=4))]
    assert (list(held.pool._clean), list(held.pool._free)) == (clean, free)
    assert not held.balloon.owes and held.balloon.held == 6


def test_what_is_there_at_the_last_moment_is_given() -> None:
    held = Held(2)
    used = held.use(2)
    held.take_back(1, 2)
    held.pool.give("m", used)
    held.balloon.settle(PATIENCE_NS)
    assert [type(effect) for effect in held.look()] == [WipePages]


def test_waiting_alone_retires_nothing_more() -> None:
    """Who has not had its step yet keeps what it was granted; the answer comes in time all the same."""
    held = Held(4)
    held.take_back(1, 4, settle=False)
    held.balloon.expire(PATIENCE_NS - 1)
    assert held.look() == [] and held.pool.free == 4
    held.balloon.expire(PATIENCE_NS)
    assert held.look() == [Send(GaveBack(1, (), refused=True, spare=0))]


def test_what_runs_makes_way_when_a_quarter_of_the_time_is_over() -> None:
    held = Held(4)
    used = held.use(4)
    held.take_back(1, 2)
    assert not held.balloon.must_yield(PATIENCE_NS // 4 - 1) and held.balloon.must_yield(PATIENCE_NS // 4)
    held.pool.give("m", used)
    held.balloon.settle(1)
    assert not held.balloon.must_yield(PATIENCE_NS), "nothing is owed any more"


def test_one_taking_at_a_time_and_no_more_than_is_held() -> None:
    held = Held(4)
    held.use(4)
    with pytest.raises(AssertionError):
        held.take_back(1, 5)
    held.take_back(1, 4)
    with pytest.raises(AssertionError):
        held.take_back(2, 1)


@pytest.mark.parametrize(("pages", "keep", "given"), [(9, 0, 4), (3, 0, 3), (9, 4, 2), (9, 6, 0), (9, 9, 0), (0, 0, 0)])
def test_a_trim_takes_what_is_free_down_to_what_is_kept(pages: int, keep: int, given: int) -> None:
    held = Held(6)
    held.use(2)
    told = held.trim(1, pages, keep=keep)[-1]
    assert isinstance(told, Send) and isinstance(told.message, GaveBack)
    assert len(pages_of(told.message.runs)) == given and not told.message.refused
    assert held.balloon.held == 6 - given


# --- wishes -----------------------------------------------------------------------------------------------------------


def asked(held: Held) -> list[NeedPages]:
    return [e.message for e in held.look() if isinstance(e, Send) and isinstance(e.message, NeedPages)]


def test_a_wish_is_asked_once_and_an_answer_awaited() -> None:
    held = Held()
    held.balloon.want(3, urgent=False)
    held.balloon.want(5, urgent=False)
    held.balloon.want(5, urgent=True)
    assert asked(held) == [NeedPages(3, urgent=False)] and held.balloon.wish is Wish.ASKED


def test_a_refused_wish_is_remembered_by_who_refused_it() -> None:
    held = Held()
    held.balloon.want(3, urgent=False)
    held.balloon.granted(REFUSED)
    held.balloon.want(3, urgent=False)
    held.balloon.want(4, urgent=False)
    assert asked(held) == [NeedPages(3, urgent=False)] and held.balloon.wish is Wish.REFUSED


def test_an_urgent_wish_is_asked_again_only_where_it_changed() -> None:
    held = Held()
    for wish, message in [(3, NeedPages(3, urgent=True)), (3, None), (4, NeedPages(4, urgent=True))]:
        held.balloon.want(wish, urgent=True)
        assert asked(held) == ([message] if message else [])
        held.balloon.granted(REFUSED)
    assert held.balloon.stands_still and not held.balloon.hopeless


def test_who_is_content_is_urgent_no_more() -> None:
    held = Held()
    held.balloon.want(3, urgent=True)
    held.balloon.content()
    assert asked(held) == [NeedPages(3, urgent=True)], "the answer comes first"
    held.balloon.granted(REFUSED)
    held.balloon.content()
    held.balloon.content()
    assert asked(held) == [NeedPages(3, urgent=False)] and not held.balloon.stands_still


def test_what_the_limit_forbids_is_hopeless_until_it_is_granted_or_wanted_no_more() -> None:
    held = Held()
    held.balloon.want(3, urgent=True)
    held.balloon.granted(EXCESSIVE)
    assert held.balloon.hopeless and not held.balloon.stands_still
    held.balloon.granted(GrantPages(runs((0, 3))))
    assert not held.balloon.hopeless and held.balloon.held == 3


def test_only_an_urgent_wish_is_hopeless() -> None:
    held = Held()
    held.balloon.want(3, urgent=False)
    held.balloon.granted(EXCESSIVE)
    assert not held.balloon.hopeless and not held.balloon.stands_still


@pytest.mark.parametrize("answer", [REFUSED, EXCESSIVE])
def test_who_is_trimmed_withdraws_its_wish(answer: GrantPages) -> None:
    held = Held(2)
    held.balloon.want(3, urgent=False)
    held.balloon.granted(answer)
    held.look()
    assert held.trim(1, 2)[0] == Send(NeedPages(0, urgent=False)) and held.balloon.wish is Wish.NONE
    held.balloon.want(1, urgent=False)
    assert asked(held) == [NeedPages(1, urgent=False)]


@pytest.mark.parametrize("answer", [REFUSED, EXCESSIVE])
def test_an_answer_to_a_wish_that_was_withdrawn_keeps_nobody_from_asking_again(answer: GrantPages) -> None:
    held = Held(2)
    held.balloon.want(3, urgent=True)
    held.balloon.granted(REFUSED)
    held.trim(1, 2)
    held.balloon.granted(answer)
    held.balloon.want(1, urgent=False)
    assert asked(held) == [NeedPages(1, urgent=False)]


def test_pages_that_come_after_all_are_taken_in() -> None:
    """They were granted while the wish was being withdrawn."""
    held = Held(2)
    held.balloon.want(3, urgent=False)
    held.balloon.granted(REFUSED)
    held.trim(1, 2)
    held.balloon.granted(GrantPages(runs((2, 5))))
    assert held.look() == [AcceptPages(runs((2, 5)))] and held.balloon.held == 3


def test_check_finds_what_is_broken() -> None:
    held = Held(4)
    held.pool.deflate(1)
    with pytest.raises(LawBroken, match="V1"):
        held.balloon.check()
