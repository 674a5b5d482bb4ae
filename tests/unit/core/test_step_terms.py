"""The terms of eq. 5 and 6."""

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.step_terms import decode_terms, prefill_terms

COUNTS = st.integers(0, 100_000)


@given(stop=COUNTS, cut=COUNTS, start=COUNTS)
def test_chunks_of_a_prompt_add_up_to_it(stop: int, cut: int, start: int) -> None:
    start, cut, stop = sorted((start, cut, stop))
    parts = (prefill_terms(cut, start), prefill_terms(stop, cut))
    assert tuple(map(sum, zip(*parts, strict=True))) == prefill_terms(stop, start)


@given(context=COUNTS, rows=st.integers(1, 64), steps=st.integers(1, 200))
def test_a_run_is_its_steps_each_of_which_leaves_every_row_a_token_longer(context: int, rows: int, steps: int) -> None:
    single = [decode_terms(context + rows * step, rows) for step in range(steps)]
    assert tuple(map(sum, zip(*single, strict=True))) == decode_terms(context, rows, steps)
