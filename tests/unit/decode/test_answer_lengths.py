"""What an instance expects of answers."""

from __future__ import annotations

import random

import pytest

from aegis.core.ids import ModelId
from aegis.core.views import ANSWER_TOKENS
from decode.answer_lengths import AnswerLengths

M, OTHER = ModelId("m"), ModelId("other")


@pytest.mark.parametrize("mean", [20.0, 3000.0])
def test_the_mean_is_learned_though_many_answers_have_not_ended(mean: float) -> None:
    drawn, lengths = random.Random(1), AnswerLengths()
    left = [drawn.expovariate(1 / mean) for _ in range(64)]
    for _ in range(20_000):
        lengths.made(M, len(left))
        for row, tokens in enumerate(left):
            left[row] = tokens - 1
            if left[row] <= 0:
                lengths.ended(M)
                left[row] = drawn.expovariate(1 / mean)
    assert lengths.mean(M) == pytest.approx(mean, rel=0.2)
    assert lengths.mean(OTHER) == ANSWER_TOKENS


def test_a_first_answer_does_not_say_all() -> None:
    lengths = AnswerLengths()
    lengths.made(M, 1)
    lengths.ended(M)
    assert ANSWER_TOKENS / 2 < lengths.mean(M) < ANSWER_TOKENS


def test_what_is_new_counts_more() -> None:
    lengths = AnswerLengths()
    for tokens in (1000,) * 2000 + (10,) * 2000:
        lengths.made(M, tokens)
        lengths.ended(M)
    assert lengths.mean(M) < 50


def test_a_model_that_comes_again_is_new() -> None:
    lengths = AnswerLengths()
    lengths.made(M, 100_000)
    lengths.forget(M)
    assert lengths.mean(M) == ANSWER_TOKENS
