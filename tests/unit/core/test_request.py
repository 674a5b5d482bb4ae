"""The end of a sequence, and the contents of a replay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import ModelId, RequestId
from aegis.core.request import FinishReason, Job, Sampling

END = 7


def job(*, max_tokens: int = 5, min_tokens: int = 0, sent: tuple[int, ...] = ()) -> Job:
    sampling = Sampling(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=(END, 9))
    return Job(RequestId(1), 1, ModelId("m"), (1, 2, 3), sampling, 0, sent)


@pytest.mark.parametrize(
    ("index", "token", "min_tokens", "expected"),
    [
        (0, 1, 0, None),
        (0, END, 0, FinishReason.STOP),
        (1, 9, 0, FinishReason.STOP),
        (3, 1, 0, None),
        (4, 1, 0, FinishReason.LENGTH),
        (4, END, 0, FinishReason.STOP),
        (1, END, 2, None),
        (2, END, 2, FinishReason.STOP),
        (4, END, 5, FinishReason.LENGTH),
    ],
)
def test_finish(index: int, token: int, min_tokens: int, expected: FinishReason | None) -> None:
    assert job(min_tokens=min_tokens).finish(index, token) is expected


@given(st.lists(st.integers(0, 9), min_size=20), st.integers(1, 20), st.integers(0, 20))
def test_a_sequence_ends_between_its_least_and_its_most_tokens(
    tokens: list[int], max_tokens: int, min_tokens: int
) -> None:
    """With `min_tokens` tokens before it at least, a stop token ends it; `max_tokens` do in any case."""
    sequence = job(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
    last = next(i for i, token in enumerate(tokens) if sequence.finish(i, token))
    assert last < max_tokens
    assert last == max_tokens - 1 or (tokens[last] in (END, 9) and last >= sequence.sampling.min_tokens)


def test_what_was_sent_is_prefilled_again_and_takes_no_room_twice() -> None:
    assert (job().prefill_tokens, job(sent=(4, 5)).prefill_tokens) == (3, 5)
    assert job().most_tokens == job(sent=(4, 5)).most_tokens == 8
