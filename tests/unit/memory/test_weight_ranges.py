"""The three laws of the addresses of weights."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.errors import LawBroken
from aegis.core.ids import ModelId
from memory.weight_ranges import WeightRanges

MODELS = [ModelId(f"m{i}") for i in range(6)]


class Ranges(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranges = WeightRanges(20)
        self.placed: dict[ModelId, tuple[int, int]] = {}

    @rule(model=st.sampled_from(MODELS), pages=st.integers(1, 9))
    def place(self, model: ModelId, pages: int) -> None:
        if model in self.placed:
            return
        taken = {p for offset, size in self.placed.values() for p in range(offset, offset + size)}
        fits = (start for start in range(20 - pages + 1) if taken.isdisjoint(range(start, start + pages)))
        offset = self.ranges.place(model, pages)
        assert offset == next(fits, None), "W3: where it fits first, and refused only where it fits nowhere"
        if offset is not None:
            self.placed[model] = (offset, pages)

    @rule(model=st.sampled_from(MODELS))
    def release(self, model: ModelId) -> None:
        if self.placed.pop(model, None):
            self.ranges.release(model)

    @invariant()
    def law_w1_ranges_are_disjoint_and_inside(self) -> None:
        self.ranges.check()
        pages = [p for offset, size in self.placed.values() for p in range(offset, offset + size)]
        assert len(set(pages)) == len(pages) == self.ranges.placed and set(pages) <= set(range(20))

    @invariant()
    def law_w2_a_placed_model_stays_where_it_is(self) -> None:
        assert {m: (self.ranges.offset(m), self.ranges.pages(m)) for m in MODELS if m in self.ranges} == self.placed


TestRanges = Ranges.TestCase


def test_models_may_be_replaced_for_ever_where_the_new_one_comes_before_the_old_one_leaves() -> None:
    ranges = WeightRanges(10)
    offsets = [ranges.place(MODELS[0], 4)]
    for old, new in (*pairwise(MODELS), *pairwise(reversed(MODELS))):
        offsets.append(ranges.place(new, 4))
        ranges.release(old)
    assert set(offsets) == {0, 4}


@pytest.mark.parametrize(
    "placed", [{MODELS[0]: (0, 2), MODELS[1]: (1, 2)}, {MODELS[0]: (9, 2)}], ids=["two overlap", "one ends outside"]
)
def test_check_finds_what_is_broken(placed: dict[ModelId, tuple[int, int]]) -> None:
    ranges = WeightRanges(10)
    ranges._placed = placed
    with pytest.raises(LawBroken, match="W1"):
        ranges.check()
