"""The decode core, scripted: runs of many steps, how long they may be, and what ends them before their time."""

from __future__ import annotations

import pytest

from aegis.core.block_runs import count_blocks
from aegis.core.clock import NS_PER_S
from aegis.core.effects import EndRun, Run, UnmapWeights
from aegis.core.events import Stepped, Tick
from aegis.core.ids import PageRun, RequestId
from aegis.core.messages import Broken, Cancel, GaveBack, GrantPages, NeedPages, TakeBack
from aegis.core.request import Token
from decode.core import DecodeCore
from decode.policies.weighted_round_robin import WeightedRoundRobin
from memory.pages import count_pages
from tests.sim.driven import Driven, decode
from tests.unit.decode.turns import (
    IN,
    PREFETCH,
    SCRUB,
    TWO_MODELS_FIT,
    WEIGHTS,
    WIDE,
    WIDE_2,
    A,
    B,
    lent,
    running,
    settle,
    step,
    take,
    two_turns,
)

PATIENCE_NS = 40_000_000


def run_of(driven: Driven[DecodeCore]) -> Run:
    """That the last event has begun."""
    (run,) = driven.runs()
    return run


def ran(driven: Driven[DecodeCore], *steps: tuple[int, ...], after_ns: int = 1_000_000) -> None:
    """A run ends after these steps, each with a token for each row."""
    made = tuple(tuple(Token(token) for token in step) for step in steps)
    driven.on(Stepped(made, after_ns), after_ns=after_ns)


def two_running() -> Driven[DecodeCore]:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    take(driven, 2, A)
    settle(driven)
    assert running(driven) == [1, 2]
    return driven


# --- what a run has made ----------------------------------------------------------------------------------------------


def test_all_steps_of_a_run_count() -> None:
    driven = two_running()
    before = driven.core.counters.steps, driven.core.counters.generated_tokens
    first, second = run_of(driven).rows
    ran(driven, (3, 4), (5, 6), (8, 9))
    assert (driven.core.counters.steps, driven.core.counters.generated_tokens) == (before[0] + 3, before[1] + 6)
    rows = run_of(driven).rows
    assert [row.token for row in rows] == [8, 9]
    assert [row.index for row in rows] == [first.index + 3, second.index + 3]
    assert [row.start for row in rows] == [first.start + 3, second.start + 3]


def test_a_sequence_leaves_with_the_last_token_of_a_run() -> None:
    """Tokens before the last step's end nobody: the run would have ended there."""
    driven = two_running()
    ran(driven, (2, 2), (2, 2), (7, 2))
    assert running(driven) == [2] and driven.core.queued == 0


def test_the_mean_step_is_what_is_learned() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    settle(driven)
    for _ in range(4):
        ran(driven, *[(2,)] * 10, after_ns=10 * 50_000_000)
    assert driven.core._step_times.latency[A.model].decode_ns(30) == pytest.approx(50_000_000, rel=0.1)


# --- how long it may be -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "held"), [(3 + 6, [5, 5, 5, 6]), (3 + 2, [1, 1, 2, 2])], ids=["blocks ahead", "no room for any"]
)
def test_a_run_makes_no_more_steps_than_there_are_blocks_for(pages: int, held: list[int]) -> None:
    driven = decode(WIDE, pages=pages)
    take(driven, 1, WIDE, prompt=14)
    settle(driven)
    for position, blocks in zip(range(14, 18), held, strict=True):
        run = run_of(driven)
        (row,) = run.rows
        assert (row.start, count_blocks(row.blocks)) == (position, blocks)
        assert run.steps == 16 * blocks - position
        ran(driven, (2,))


def test_nobody_gets_blocks_ahead_of_what_it_can_ever_use() -> None:
    driven = decode(WIDE, pages=20)
    take(driven, 1, WIDE, prompt=14, max_tokens=20)
    settle(driven)
    assert count_blocks(run_of(driven).rows[0].blocks) == 3


def test_the_row_with_the_fewest_blocks_says_how_many_steps() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A, prompt=10)
    take(driven, 2, A, prompt=31, max_tokens=3)
    settle(driven)
    assert run_of(driven).steps == 3 * 16 - 31


def test_a_run_ends_with_its_turn() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, policy=WeightedRoundRobin(q_max_ns=NS_PER_S))
    take(driven, 1, A)
    settle(driven)
    begun_ns = driven.now_ns
    assert run_of(driven).until_ns == begun_ns + NS_PER_S
    ran(driven, (2,))
    assert run_of(driven).until_ns == begun_ns + NS_PER_S, "the turn goes on"
    ran(driven, (2,), after_ns=NS_PER_S)
    assert run_of(driven).until_ns == driven.now_ns + NS_PER_S, "another one of the same batch"


def test_while_pages_are_owed_each_step_is_a_run_of_its_own() -> None:
    driven = decode(WIDE, pages=5)
    take(driven, 1, WIDE)
    settle(driven)
    driven.on(TakeBack(1, 5, PATIENCE_NS))
    assert driven.last[-1] == EndRun()
    ran(driven, (2,))
    assert run_of(driven).steps == 1
    driven.on(Tick(), after_ns=PATIENCE_NS)
    assert [answer.refused for answer in driven.said(GaveBack)] == [True]
    ran(driven, (2,))
    assert run_of(driven).steps > 1


# --- what ends it before its time -------------------------------------------------------------------------------------


def test_what_changes_nothing_for_a_run_lets_it_go_on() -> None:
    driven = two_running()
    for event in (Tick(), Cancel(RequestId(9), 1), GrantPages((PageRun(20, 21),))):
        assert driven.on(event)[-1:] != [EndRun()]


def test_a_request_of_the_running_model_is_brought_in_at_once_and_then_joins() -> None:
    driven = two_running()
    take(driven, 3, A)
    assert driven.under_way(IN) == 1 and driven.last[-1] != EndRun()
    driven.complete(IN)
    assert driven.last[-1] == EndRun()
    ran(driven, (2, 2))
    assert running(driven) == [1, 2, 3]


def test_a_request_of_another_model_is_prepared_beside_the_run() -> None:
    driven = decode(A, B, pages=20)
    take(driven, 1, A)
    settle(driven)
    take(driven, 2, B)
    assert driven.under_way(PREFETCH) == driven.under_way(IN) == 1 and driven.last[-1] != EndRun()
    driven.complete(PREFETCH)
    driven.complete(IN)
    assert not driven.asked(EndRun)


def test_a_cancellation_ends_the_run_even_while_another_one_waits_to_be_in_it() -> None:
    """One more is on the device than runs, then one less: as many as run, but not the same ones."""
    driven = lent(WIDE, pages=3 + 3)
    for request in (1, 2):
        take(driven, request, WIDE, prompt=14, max_tokens=18)
    settle(driven)
    ran(driven, (2, 2), (2, 2))
    assert running(driven) == [1]
    driven.on(Cancel(RequestId(1), 1))
    assert driven.last[-1] == EndRun()


# --- blocks ahead are for whoever needs them --------------------------------------------------------------------------


def test_blocks_ahead_do_not_keep_the_next_model_out() -> None:
    driven = decode(WIDE, WIDE_2, pages=3 + 1 + 3 + 1)
    take(driven, 1, WIDE)
    settle(driven)
    assert count_blocks(run_of(driven).rows[0].blocks) == 5
    take(driven, 2, WIDE_2)
    assert not driven.under_way(PREFETCH), "the run writes there"
    ran(driven, (2,))
    assert driven.under_way(PREFETCH) == 1 and count_blocks(run_of(driven).rows[0].blocks) == 1


def test_blocks_ahead_of_one_are_for_the_next_step_of_another() -> None:
    driven = lent(WIDE, pages=3 + 6)
    take(driven, 1, WIDE, prompt=10)
    take(driven, 2, WIDE, prompt=14)
    settle(driven)
    assert [count_blocks(row.blocks) for row in run_of(driven).rows] == [5, 1]
    ran(driven, (2, 2), (2, 2))
    assert [count_blocks(row.blocks) for row in run_of(driven).rows] == [1, 5]
    assert not driven.said(NeedPages, driven.effects) and run_of(driven).steps == 4


def test_blocks_ahead_are_given_back_first() -> None:
    driven = decode(WIDE, pages=3 + 5)
    take(driven, 1, WIDE)
    settle(driven)
    driven.on(TakeBack(1, 4, PATIENCE_NS))
    ran(driven, (2,))
    driven.complete(SCRUB)
    assert [(answer.number, answer.refused) for answer in driven.said(GaveBack)] == [(1, False)]
    ran(driven, (2,))
    assert running(driven) == [1] and driven.core.counters.preemptions == 0 and not driven.said(Broken)
    assert not driven.under_way(WEIGHTS)


def test_blocks_ahead_of_who_waits_are_for_whose_turn_it_is() -> None:
    driven = two_turns(3 + 3 + 5)
    settle(driven)
    step(driven)
    settle(driven)
    assert driven.runs(driven.effects)[-1].model == WIDE_2.model
    assert driven.core.counters.swap_out_bytes == 0 and not driven.asked(UnmapWeights, driven.effects)


def test_blocks_ahead_of_who_waits_are_idle() -> None:
    driven = two_turns(20)
    settle(driven)
    ran(driven, (2,))
    assert running(driven) == [2] and driven.core.ledger.pool.free == 20 - 2 * (3 + 5)
    driven.on(TakeBack(1, 20, PATIENCE_NS, gentle=True))
    driven.complete(SCRUB)
    assert [count_pages(answer.runs) for answer in driven.said(GaveBack)] == [4 + 4]


def test_nobody_gets_blocks_ahead_while_pages_are_owed() -> None:
    driven = decode(WIDE, pages=3 + 5)
    take(driven, 1, WIDE)
    driven.on(TakeBack(1, 8, PATIENCE_NS))
    settle(driven)
    assert count_blocks(run_of(driven).rows[0].blocks) == 1
