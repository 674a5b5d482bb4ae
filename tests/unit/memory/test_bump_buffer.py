"""The bump buffer's three laws."""

from __future__ import annotations

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
        end = max((offset + size for offset, size in self.placed.values()), default=0)
        offset = self.buffer.place(model, pages)
        if end + pages > 20:
            assert offset is None
        else:
            assert offset == end
            self.placed[model] = (end, pages)

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

    @invariant()
    def law_b3_an_empty_buffer_begins_at_0(self) -> None:
        assert self.placed or self.buffer._next == 0


TestBuffer = Buffer.TestCase


def test_a_gap_is_not_reused_before_the_end_comes_back_to_it() -> None:
    buffer = BumpBuffer(10)
    assert [buffer.place(model, 3) for model in MODELS[:3]] == [0, 3, 6]
    buffer.release(MODELS[1])
    assert buffer.place(MODELS[3], 3) is None
    buffer.release(MODELS[2])
    assert buffer.place(MODELS[3], 3) == 3


@pytest.mark.parametrize(("law", "placed", "pointer"), [("B1", {"a": (0, 2), "b": (1, 2)}, 3), ("B3", {}, 2)])
def test_check_finds_what_is_broken(law: str, placed: dict[ModelId, tuple[int, int]], pointer: int) -> None:
    buffer = BumpBuffer(10)
    buffer._placed, buffer._next = placed, pointer
    with pytest.raises(LawBroken, match=law):
        buffer.check()
