"""However a sequence is cut into batches, and whichever of them is written twice, it is put together as it was."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.request import FinishReason, Token
from aegis.metadata.batches import Entry, assemble, encode

TOKENS = st.lists(
    st.builds(
        Token,
        st.integers(0, 1 << 20),
        st.none() | st.floats(-50, 0),
        st.lists(st.tuples(st.integers(0, 9), st.floats(-50, 0)), max_size=2).map(tuple),
    ),
    max_size=12,
)


def cut(said: list[Token], borders: set[int]) -> list[bytes]:
    edges = [0, *sorted(b for b in borders if 0 < b < len(said)), len(said)]
    finish = FinishReason.STOP
    return [
        encode([Entry(0, first, tuple(said[first:end]), finish if end == len(said) else None)])
        for first, end in pairwise(edges)
    ]


@given(TOKENS, st.sets(st.integers(0, 12)), st.data())
def test_batches_written_twice_count_once(said: list[Token], borders: set[int], data: st.DataObject) -> None:
    batches = [batch for batch in cut(said, borders) for _ in range(data.draw(st.integers(1, 2)))]
    (known,) = assemble(batches, 1)
    assert known.tokens == said
    assert known.finish is FinishReason.STOP


@given(TOKENS, st.sets(st.integers(0, 12)), st.data())
def test_a_missing_batch_ends_what_is_known(said: list[Token], borders: set[int], data: st.DataObject) -> None:
    batches = cut(said, borders)
    missing = data.draw(st.integers(0, len(batches) - 1))
    (known,) = assemble([b for n, b in enumerate(batches) if n != missing], 1)
    assert known.tokens == said[: len(known.tokens)]
    assert known.tokens == said or known.finish is None


def test_sequences_are_kept_apart() -> None:
    a, b = (Token(1), Token(2)), (Token(3),)
    batches = [encode([Entry(1, 0, b)]), encode([Entry(0, 0, a), Entry(1, 1, (), FinishReason.LENGTH)])]
    first, second = assemble(batches, 2)
    assert (first.tokens, first.finish) == ([*a], None)
    assert (second.tokens, second.finish) == ([*b], FinishReason.LENGTH)


@pytest.mark.parametrize("batch", [b"", b"\xc1", encode([Entry(5, 0)]), encode(["x"])])
def test_what_others_wrote_is_no_batch(batch: bytes) -> None:
    with pytest.raises(ValueError):
        assemble([batch], 1)
