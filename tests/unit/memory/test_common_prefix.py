"""The length of the common beginning of two sequences of tokens."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from memory.common_prefix import common_tokens

tokens = st.lists(st.integers(0, 1), max_size=40).map(tuple)


@given(tokens, tokens)
def test_it_is_as_far_as_tokens_are_equal(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    assert common_tokens(one, other) == len(
        list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    )
