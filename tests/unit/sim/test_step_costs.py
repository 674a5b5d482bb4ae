"""Durations of steps and runs of steps."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aegis.sim.step_costs import StepCosts, copy_ns

COSTS = st.builds(
    StepCosts,
    decode_ps=st.integers(1, 10**12),
    context_token_ps=st.integers(0, 10**7),
    row_ps=st.integers(0, 10**9),
    batch_ps=st.integers(0, 10**9),
    prefill_ps=st.integers(0, 10**11),
    token_ps=st.integers(0, 10**9),
    token2_ps=st.integers(0, 10**5),
)
CONTEXTS = st.integers(0, 10**6)
BATCHES = st.integers(1, 512)


@given(COSTS, CONTEXTS, BATCHES, st.integers(0, 40))
def test_a_run_lasts_as_long_as_its_steps_but_for_less_than_a_nanosecond_each(
    costs: StepCosts, context: int, batch: int, steps: int
) -> None:
    singly = sum(costs.decode_ns(context + step * batch, batch) for step in range(steps))
    assert singly - steps < costs.run_ns(context, batch, steps) <= singly or not steps


@given(
    st.integers(1, 10**7).map(lambda us: StepCosts(decode_ps=us * 10**6, context_token_ps=60_000, row_ps=99_000_000)),
    CONTEXTS,
    BATCHES,
    st.integers(0, 40),
)
def test_whole_nanosecond_coefficients_lose_nothing(costs: StepCosts, context: int, batch: int, steps: int) -> None:
    singly = sum(costs.decode_ns(context + step * batch, batch) for step in range(steps))
    assert costs.run_ns(context, batch, steps) == singly


@given(COSTS, CONTEXTS, BATCHES, st.integers(-5, 10**12))
@example(StepCosts(decode_ps=1), 0, 1, 1 << 50)  # more of them than a float tells apart
def test_the_steps_that_fit_are_the_most_that_do(costs: StepCosts, context: int, batch: int, budget_ns: int) -> None:
    steps = costs.steps_within(context, batch, budget_ns)
    assert steps >= 0
    assert steps == 0 or costs.run_ns(context, batch, steps) <= budget_ns
    assert costs.run_ns(context, batch, steps + 1) > budget_ns


@given(
    st.builds(StepCosts, decode_ps=st.integers(1, 3000), context_token_ps=st.integers(0, 40)),
    st.integers(0, 50),
    st.integers(1, 8),
    st.integers(0, 60),
    st.integers(-50, 200),
    st.integers(0, 8),
)
def test_the_steps_in_time_are_those_that_end_by_their_deadlines(
    costs: StepCosts, context: int, batch: int, steps: int, budget_ns: int, each_ns: int
) -> None:
    in_time = [n for n in range(1, steps + 1) if costs.run_ns(context, batch, n) <= budget_ns + n * each_ns]
    assert costs.steps_in_time(context, batch, steps, budget_ns=budget_ns, each_ns=each_ns) == len(in_time)


@given(COSTS, CONTEXTS, BATCHES, st.integers(1, 10**9))
def test_a_run_fits_exactly_into_its_own_duration(costs: StepCosts, context: int, batch: int, steps: int) -> None:
    longest = costs.steps_within(context, batch, costs.run_ns(context, batch, steps))
    assert longest >= steps
    assert costs.run_ns(context, batch, longest) == costs.run_ns(context, batch, steps)


@given(COSTS, st.integers(1, 10**5))
def test_a_prefill_reads_the_weights_as_a_decode_step_does(costs: StepCosts, tokens: int) -> None:
    assert costs.prefill_ns(tokens) >= costs.decode_ns(tokens, 1)
    assert costs.prefill_ns(tokens + 1) >= costs.prefill_ns(tokens)


@given(COSTS, st.integers(1, 10**5), st.integers(0, 10**5))
def test_chunks_cost_what_the_whole_does_and_the_constant_once_more(costs: StepCosts, start: int, tokens: int) -> None:
    """Exactly, but for rounding, where none is so short that reading the weights takes longest."""
    costs = replace(costs, decode_ps=1, context_token_ps=0, row_ps=0)
    whole_ns, stop = costs.prefill_ns(start + tokens), start + tokens
    parts_ns = costs.prefill_ns(start) + costs.prefill_ns(stop, start)
    assert 0 <= parts_ns - whole_ns - costs.prefill_ps // 1_000 <= 2


@given(COSTS, st.integers(0, 10**5), st.integers(1, 10**5))
def test_a_chunk_reads_the_weights_and_what_is_cached(costs: StepCosts, start: int, tokens: int) -> None:
    assert costs.prefill_ns(start + tokens, start) >= costs.decode_ns(start + tokens, 1)


def test_published_figures_come_out_in_nanoseconds() -> None:
    costs = StepCosts.of_ms(decode=(8.45, 0.06, 0.099), prefill=(1.0, 22.7, 0.3))
    assert costs.decode_ns(5_000, 8) == 8_450_000 + 300_000 + 792_000
    assert costs.run_ns(5_000, 8, 3) == 3 * costs.decode_ns(5_000, 8) + 60 * (8 + 16)
    assert costs.prefill_ns(2_000) == 1_000_000 + 45_400_000 + 1_200_000


@pytest.mark.parametrize(("nbytes", "rate", "ns"), [(0, 10, 0), (1, 10**9, 1), (10**9 + 1, 2 * 10**9, 500_000_001)])
def test_a_copy_is_never_shorter_than_its_bytes_need(nbytes: int, rate: int, ns: int) -> None:
    assert copy_ns(nbytes, rate) == ns


PIECES = st.lists(
    st.tuples(st.integers(0, 5_000), st.integers(1, 5_000)).map(lambda piece: (piece[0], sum(piece))),
    min_size=1,
    max_size=5,
)


@given(COSTS, PIECES)
def test_prompts_of_one_step_take_less_than_one_by_one_and_more_than_any(
    costs: StepCosts, pieces: list[tuple[int, int]]
) -> None:
    alone_ns = [costs.prefill_ns(stop, start) for start, stop in pieces]
    assert costs.step_ns(pieces[:1]) == alone_ns[0]
    assert max(alone_ns) <= costs.step_ns(pieces) <= sum(alone_ns)


@given(COSTS, PIECES, CONTEXTS, BATCHES)
def test_rows_that_decode_beside_prompts_add_what_they_read_and_compute(
    costs: StepCosts, pieces: list[tuple[int, int]], context: int, batch: int
) -> None:
    """But not a step of their own."""
    added_ns = costs.step_ns(pieces, context, batch) - costs.step_ns(pieces)
    own_ps = costs.context_token_ps * context + costs.row_ps * batch
    assert abs(added_ns - own_ps / 1_000) <= 1
    assert costs.step_ns(pieces, context, batch) <= costs.step_ns(pieces) + costs.decode_ns(context, batch)


def test_what_a_step_takes_whatever_its_rows_are_is_there_once() -> None:
    costs = StepCosts.of_ms(decode=(6.0, 0.0, 0.1), prefill=(5.0, 10.0, 0.0))
    assert costs.step_ns([(0, 100)]) == 6_100_000
    assert costs.step_ns([(0, 100)] * 8) == 13_000_000
    assert costs.step_ns([(0, 100)] * 8, 4_000, 4) == 13_400_000
