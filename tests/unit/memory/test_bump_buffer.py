"""The bump buffer's three laws."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.errors import LawBroken
from aegis.core.ids import ModelId
from memory.bump_buffer import BumpBuffer

MODELS = [ModelId(f"m{i}") for i in range(6)]


class Buffer(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = BumpBuffer(20)
        self.placed: dict[ModelId, tuple[int, int]] = {}

    @rule(model=st.sampled_from(MODELS), pages=st.integers(1, 9))
    def place(self, model: ModelId, pages: int) -> None:
        if model in self.placed:
            return
        taken = {p for offset, size in self.placed.values() for p in range(offset, offset + size)}
        fits = (start for start in range(20 - pages + 1) if taken.isdisjoint(range(start, start + pages)))
        offset = self.buffer.place(model, pages)
        assert offset == next(fits, None), "B3: where it fits first, and refused only where it fits nowhere"
        if offset is not None:
            self.placed[model] = (offset, pages)

    @rule(model=st.sampled_from(MODELS))
    def release(self, model: ModelId) -> None:
        if self.placed.pop(model, None):
            self.buffer.release(model)

    @invariant()
    def law_b1_ranges_are_disjoint_and_inside(self) -> None:
        self.buffer.check()
        pages = [p for offset, size in self.placed.values() for p in range(offset, offset + size)]
        assert len(set(pages)) == len(pages) == self.buffer.placed and set(pages) <= set(range(20))

    @invariant()
    def law_b2_a_placed_model_stays_where_it_is(self) -> None:
        assert {m: (self.buffer.offset(m), self.buffer.pages(m)) for m in MODELS if m in self.buffer} == self.placed


TestBuffer = Buffer.TestCase


def test_models_may_be_replaced_for_ever_where_the_new_one_comes_before_the_old_one_leaves() -> None:
    buffer = BumpBuffer(10)
    offsets = [buffer.place(MODELS[0], 4)]
    for old, new in (*pairwise(MODELS), *pairwise(reversed(MODELS))):
        offsets.append(buffer.place(new, 4))
        buffer.release(old)
    assert set(offsets) == {0, 4}


@pytest.mark.parametrize(
    "placed", [{MODELS[0]: (0, 2), MODELS[1]: (1, 2)}, {MODELS[0]: (9, 2)}], ids=["two overlap", "one ends outside"]
)
def test_check_finds_what_is_broken(placed: dict[ModelId, tuple[int, int]]) -> None:
    buffer = BumpBuffer(10)
    buffer._placed = placed
    with pytest.raises(LawBroken, match="B1"):
        buffer.check()
