from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import RequestId
from aegis.core.request import Sampling
from aegis.engine.passes import PASS_TOKENS, REPORTED_BYTES, passes, reported_tokens
from aegis.engine.protocol import StepRow
from tests.unit.engine.generation import begin
from tests.unit.engine.test_shared_steps import LENGTHS, check, drawn
from tests.unit.engine.test_transformers_engine import TELLING, attached, make

TOKENS = 8
"""So many in a pass: every prompt but the shortest ones takes several."""

row_shapes = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9), st.booleans()), min_size=1, max_size=12)


def rows_of(shapes: list[tuple[int, int, bool]]) -> list[StepRow]:
    return [
        StepRow(RequestId(at), range(100 * at, 100 * at + count), start, np.zeros(0, dtype=np.int64), samples)
        for at, (count, start, samples) in enumerate(shapes)
    ]


@given(row_shapes, st.integers(4, 70))
def test_passes_have_each_token_once_in_order(shapes: list[tuple[int, int, bool]], most: int) -> None:
    rows = rows_of(shapes)
    made = list(passes(rows, most))
    for at, row in enumerate(rows):
        parts = [part.row for each in made for part in each if part.at == at]
        assert [token for part in parts for token in part.tokens] == list(row.tokens)
        assert [part.start for part in parts] == [row.start, *(part.stop for part in parts[:-1])]
        assert [part.samples for part in parts] == [False] * (len(parts) - 1) + [row.samples]
        assert len(parts) == 1 or len(row.tokens) > most, "a row that fits is not cut"


@given(row_shapes, st.integers(4, 70))
def test_a_pass_is_bounded_and_rows_of_one_token_are_in_the_first(
    shapes: list[tuple[int, int, bool]], most: int
) -> None:
    rows = rows_of(shapes)
    first, *later = passes(rows, most)
    for parts in (first, *later):
        assert sum(len(part.row.tokens) for part in parts if len(part.row.tokens) > 1) <= most
    assert all(len(part.row.tokens) > 1 for parts in later for part in parts)
    assert first or not rows
    assert all(later)


@pytest.mark.parametrize("name", TELLING)
def test_a_step_of_several_passes_equals_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PASS_TOKENS, "cpu", TOKENS)
    check(make(name, tmp_path / name), max(LENGTHS))


def test_a_prompt_is_reported_pass_by_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = make("llama", tmp_path / "llama")
    monkeypatch.setitem(REPORTED_BYTES, "cpu", TOKENS * 4 * built.reference.config.vocab_size)
    engine, arena = attached(built)
    prompt = drawn(41, 1)
    run = begin(engine, arena, built, 1, prompt, room=2, sampling=Sampling(max_tokens=2, prompt_logprobs=1))
    with torch.inference_mode():
        expected = torch.log_softmax(built.reference(torch.tensor([prompt])).logits[0], -1)
    assert run.first is not None
    assert [token.id for token in run.first.prompt] == prompt[1:]
    assert [token.logprob for token in run.first.prompt] == pytest.approx(
        [float(expected[at, token]) for at, token in enumerate(prompt[1:])], abs=1e-4
    )


@pytest.mark.parametrize("device", PASS_TOKENS)
def test_logits_that_are_reported_have_a_bound_whatever_the_vocabulary(device: str) -> None:
    assert 4 * 152_000 * reported_tokens(152_000, device) <= REPORTED_BYTES[device]
    assert reported_tokens(1000, device) == PASS_TOKENS[device]
    assert reported_tokens(1 << 30, device) == 4
