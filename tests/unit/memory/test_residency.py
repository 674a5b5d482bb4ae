"""Weights on one device: absent, loading, resident."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.errors import LawBroken
from aegis.core.ids import ModelId, PageRun
from aegis.core.request import EventHandle
from memory.bump_buffer import BumpBuffer
from memory.pages import NoPages, PagePool, count_pages
from memory.residency import Residency, WeightsAdmitted

SIZES = {ModelId("a"): 2, ModelId("b"): 3, ModelId("b2"): 3, ModelId("c"): 5, ModelId("d"): 7}
models = st.sampled_from(sorted(SIZES))


def residency(pages: int) -> tuple[PagePool, Residency]:
    pool, ranges = PagePool([PageRun(0, pages)]), BumpBuffer(100)
    held = Residency(pool, ranges)
    for model, size in SIZES.items():
        ranges.place(model, size)
        held.add(model)
    return pool, held


class Weights(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.held = residency(11)
        self.book: dict[ModelId, str] = {}
        self.abandoned: set[ModelId] = set()

    @rule(model=models, expendable=st.lists(models, unique=True), spare=st.integers(0, 3))
    def admit(self, model: ModelId, expendable: list[ModelId], spare: int) -> None:
        if model in self.book:
            return
        victims = [m for m in expendable if self.book.get(m) == "resident"]
        reachable = self.pool.free + sum(SIZES[m] for m in victims)
        admitted = self.held.admit(model, expendable, spare=spare)
        if isinstance(admitted, NoPages):
            assert admitted == NoPages(SIZES[model] + spare, reachable) and reachable < SIZES[model] + spare
            return
        assert count_pages(admitted.runs) == SIZES[model] and self.pool.free >= spare
        assert list(admitted.evicted) == victims[: len(admitted.evicted)], "first ones first, as far as needed"
        if admitted.evicted:
            assert self.pool.free - SIZES[admitted.evicted[-1]] < spare, "one victim fewer would have done"
        for victim in admitted.evicted:
            del self.book[victim]
        self.book[model] = "loading"
        self.held.start_loading(model, EventHandle(0, 1))

    @rule(model=models)
    def abandon(self, model: ModelId) -> None:
        if self.book.get(model) == "loading":
            assert self.held.abandon(model) == EventHandle(0, 1)
            self.abandoned.add(model)

    @rule(model=models)
    def loaded(self, model: ModelId) -> None:
        if self.book.get(model) == "loading":
            assert self.held.loaded(model) == (model not in self.abandoned)
            self.book[model] = "resident"
            self.abandoned.discard(model)

    @rule(model=models)
    def evict(self, model: ModelId) -> None:
        if self.book.get(model) != "loading":
            self.held.evict(model)
            self.book.pop(model, None)

    @invariant()
    def law_r1_a_model_owns_the_pages_of_its_image_or_none(self) -> None:
        self.held.check()
        self.pool.check()
        assert {m: self.pool.held(m) for m in SIZES} == {m: SIZES[m] if m in self.book else 0 for m in SIZES}

    @invariant()
    def law_r2_what_is_loading_stays(self) -> None:
        """Loading models were in `expendable` again and again, and are all still there."""
        assert set(self.held.resident()) == {m for m, state in self.book.items() if state == "resident"}
        assert {m for m, _ in self.held.loading()} == {m for m, state in self.book.items() if state == "loading"}
        assert all(self.held.is_resident(m) == (self.book.get(m) == "resident") for m in SIZES)
        assert all(self.held.is_loading(m) == (self.book.get(m) == "loading") for m in SIZES)
        assert {m for m in SIZES if self.held.is_abandoned(m)} == self.abandoned


TestWeights = Weights.TestCase


def test_r2_a_loading_model_is_no_victim() -> None:
    pool, held = residency(5)
    held.admit(ModelId("a"), [])
    held.start_loading(ModelId("a"), EventHandle(0, 1))
    assert held.admit(ModelId("c"), [ModelId("a")]) == NoPages(5, 3)
    with pytest.raises(AssertionError, match="target of a transfer"):
        held.evict(ModelId("a"))
    held.loaded(ModelId("a"))
    assert held.admit(ModelId("c"), [ModelId("a")]) == WeightsAdmitted((PageRun(0, 5),), (ModelId("a"),))
    assert pool.free == 0


def test_an_abandoned_load_keeps_its_pages_until_its_event_has_passed() -> None:
    pool, held = residency(5)
    held.admit(ModelId("c"), [])
    held.start_loading(ModelId("c"), EventHandle(0, 1))
    assert held.abandon(ModelId("c")) == EventHandle(0, 1) and held.is_abandoned(ModelId("c"))
    assert held.admit(ModelId("a"), [ModelId("c")]) == NoPages(2, 0)
    with pytest.raises(AssertionError, match="target of a transfer"):
        held.evict(ModelId("c"))
    assert not held.loaded(ModelId("c")), "it is to be evicted"
    held.evict(ModelId("c"))
    assert pool.free == 5 and not held.is_abandoned(ModelId("c"))


def test_the_least_recently_used_model_is_told_of_first() -> None:
    _, held = residency(10)
    for model in "a", "b", "b2":
        held.admit(ModelId(model), [])
        held.start_loading(ModelId(model), EventHandle(0, 1))
        held.loaded(ModelId(model))
    held.used(ModelId("a"))
    assert held.resident() == ("b", "b2", "a")


def test_what_is_not_loading_cannot_be_abandoned() -> None:
    _, held = residency(5)
    with pytest.raises(AssertionError):
        held.abandon(ModelId("c"))


def test_no_more_leave_than_have_to() -> None:
    _, held = residency(5)
    for model in (ModelId("a"), ModelId("b")):
        held.admit(model, [])
    admitted = held.admit(ModelId("b2"), [ModelId("b"), ModelId("a")])
    assert isinstance(admitted, WeightsAdmitted) and admitted.evicted == (ModelId("b"),)


def test_a_refusal_evicts_nobody() -> None:
    _, held = residency(8)
    held.admit(ModelId("b"), [])
    assert held.admit(ModelId("d"), [ModelId("b")], spare=2) == NoPages(9, 8)
    assert held.resident() == (ModelId("b"),)


def test_a_model_that_leaves_for_good_gives_its_pages_back() -> None:
    pool, held = residency(8)
    held.admit(ModelId("b"), [])
    held.remove(ModelId("b"))
    assert pool.free == 8 and held.resident() == ()


@pytest.mark.parametrize("breakage", ["too few pages", "pages of another", "loading into nothing"])
def test_check_finds_what_is_broken(breakage: str) -> None:
    pool, held = residency(8)
    held.admit(ModelId("b"), [])
    weights = held._weights[ModelId("b")]
    match breakage:
        case "too few pages":
            weights.runs = (PageRun(0, 2),)
        case "pages of another":
            pool.give("b", weights.runs)
        case "loading into nothing":
            held._loading[ModelId("a")] = EventHandle(0, 1)
    with pytest.raises(LawBroken, match="R1"):
        held.check()
