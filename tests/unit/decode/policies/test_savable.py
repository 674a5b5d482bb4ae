"""The turn of a batch pauses for first tokens that would be late at its end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aegis.core.ids import ModelId, RequestId
from aegis.core.views import BatchView
from decode.policies.least_slack import LeastSlack

MS = 1_000_000
POLICY = LeastSlack()
NEWCOMER = BatchView(
    2,
    ModelId("b"),
    step_ns=5 * MS,
    tbt_ns=100 * MS,
    switch_ns=100 * MS,
    requests=(RequestId(2),),
    waiting=1,
    prefill_ns=10 * MS,
    first_due_ns=20 * MS,
    ttft_ns=100 * MS,
    resident=True,
    in_time_by_ns=5 * MS,
    worth=1.0,
    there=True,
    gap_ns=100 * MS,
    prompt_ns=10 * MS,
    piece_ns=10 * MS,
    prompt_rank_ns=0,
)
RUNNING = replace(
    NEWCOMER,
    batch=1,
    model=ModelId("a"),
    requests=(RequestId(1),),
    waiting=0,
    prefill_ns=0,
    first_due_ns=None,
    due_ns=90 * MS,
    in_time_by_ns=85 * MS,
    turn_ns=MS,
    prompt_ns=0,
    piece_ns=0,
    prompt_rank_ns=None,
)


def paused(newcomer: BatchView, running: BatchView = RUNNING) -> list[int]:
    turns = POLICY.plan([running, newcomer], 0)
    assert [turn.batch for turn in turns if not turn.pause] == [1, 2], "the running batch keeps its turn"
    assert all(not turn.decodes for turn in turns if turn.pause)
    return [turn.batch for turn in turns if turn.pause]


def test_a_first_token_that_would_be_late_at_the_end_of_the_turn_comes_in_a_pause() -> None:
    assert paused(NEWCOMER) == [2]


@pytest.mark.parametrize(
    "newcomer",
    [
        replace(NEWCOMER, first_due_ns=85 * MS, in_time_by_ns=70 * MS),  # in time at its end, too
        replace(NEWCOMER, first_due_ns=9 * MS),  # late already
        replace(NEWCOMER, there=False),
        replace(NEWCOMER, prompt_ns=51 * MS, prefill_ns=51 * MS, first_due_ns=60 * MS, in_time_by_ns=4 * MS),
    ],
    ids=["in time", "late", "not there", "longer than half a gap"],
)
def test_others_wait_for_its_end(newcomer: BatchView) -> None:
    assert paused(newcomer) == []


def test_who_has_to_begin_later_than_the_running_batch_waits_for_its_end() -> None:
    assert paused(NEWCOMER, replace(RUNNING, due_ns=9 * MS, in_time_by_ns=4 * MS)) == []


def test_the_last_step_of_the_turn_counts() -> None:
    """The turn ends after 29 ms, and a step that began before that 5 ms later."""
    assert paused(replace(NEWCOMER, first_due_ns=42 * MS, in_time_by_ns=27 * MS)) == [2]
    assert paused(replace(NEWCOMER, first_due_ns=45 * MS, in_time_by_ns=30 * MS)) == []


def test_no_turn_pauses_where_batches_are_shed() -> None:
    others = replace(RUNNING, batch=3, model=ModelId("c"), step_ns=96 * MS, turn_ns=None, worth=0.1)
    running = replace(RUNNING, due_ns=300 * MS, in_time_by_ns=295 * MS)
    calm = POLICY.plan([running, NEWCOMER, replace(others, step_ns=50 * MS)], 0)
    shedding = POLICY.plan([running, NEWCOMER, others], 0)
    assert [[turn.batch for turn in turns if turn.pause] for turns in (calm, shedding)] == [[2], []]
