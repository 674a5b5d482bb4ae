"""An instance's pages under random use: what it holds, uses, owes and gives back."""

from __future__ import annotations

from itertools import zip_longest

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aegis.core.effects import AcceptPages, Effect, RevokePages, Send, WipePages
from aegis.core.ids import PageRun
from aegis.core.messages import GaveBack, GrantPages
from memory.pages import NoPages, Runs
from tests.unit.memory.held import PAGES, PATIENCE_NS, Held, pages_of


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
        self.wiped = self.number = self.now_ns = self.since_ns = 0
        self.trimmed: dict[int, int] = {}  # pages of unanswered trims
        self.open: dict[int, int | None] = {}  # unanswered numbers: how many pages, None for a trim

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
        self.number += 1
        pages = self.open[self.number] = data.draw(st.integers(1, len(self.ours - self.leaving)))
        self.since_ns = self.now_ns
        assert self.held.take_back(self.number, pages, now_ns=self.now_ns, settle=False) == []

    @rule(pages=st.integers(0, PAGES), keep=st.integers(0, PAGES))
    def trim(self, pages: int, keep: int) -> None:
        self.number += 1
        self.open[self.number] = None
        free = self.held.pool.free
        most = max(min(free - self.held.balloon.short, pages, self.staying() - keep), 0)
        self.trimmed[self.number] = most
        self.listen(self.held.trim(self.number, pages, keep=keep))
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

    def staying(self) -> int:
        """Pages that nobody has asked for. Clean ones that leave wait for the wipes of the others."""
        return len(self.ours) - sum(filter(None, self.open.values())) - sum(self.trimmed.values())

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
        pages = self.open.pop(answer.number)  # once
        self.trimmed.pop(answer.number, None)
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
