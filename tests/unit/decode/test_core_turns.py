"""The decode core, scripted: whose turn it is, and preparing the next one."""

from __future__ import annotations

import pytest

from aegis.core.effects import (
    AbandonLoad,
    CopyBlocks,
    LoadWeights,
    Run,
    UnmapWeights,
)
from aegis.core.ids import RequestId
from aegis.core.messages import (
    Cancel,
    Phase,
    SwitchDone,
)
from decode.policies.weighted_round_robin import WeightedRoundRobin
from tests.sim.driven import decode
from tests.unit.decode.turns import (
    IN,
    PREFETCH,
    STEP_NS,
    TWO_MODELS_FIT,
    WEIGHTS,
    WIDE,
    A,
    B,
    C,
    running,
    settle,
    short_turns,
    step,
    take,
    two_turns,
)

# --- turns -----------------------------------------------------------------------------------------------------------


def test_turns_go_round_between_models() -> None:
    driven = short_turns(A, B, C, pages=20)
    for request, spec in enumerate((A, B, C), start=1):
        take(driven, request, spec)
    driven.complete(WEIGHTS)
    driven.complete(IN, 1)
    seen = running(driven)
    settle(driven)
    while len(seen) < 8:
        seen += step(driven)
        settle(driven)
    assert seen == [1, 1, 2, 3, 1, 2, 3, 1], "the first round knew of request 1 only"
    assert driven.core.counters.preemptions == 6 and driven.core.counters.switches == 7


def test_a_turn_lasts_as_long_as_its_quota() -> None:
    driven = decode(A, B, pages=20, policy=WeightedRoundRobin(q_max_ns=3 * STEP_NS))
    take(driven, 1, A)
    settle(driven)
    take(driven, 2, B)
    settle(driven)
    seen = []
    while running(driven) != [2]:
        seen += running(driven)
        driven.stepped(2)
    assert seen == [1] * len(seen) and len(seen) >= 1
    quota = driven.core._work.turn
    assert quota is not None and quota.started_ns == driven.now_ns


def test_the_proxy_hears_who_has_the_turn() -> None:
    driven = two_turns(20, A, B)
    assert driven.said(Phase, driven.effects) == [Phase((RequestId(1),), running=True)]
    settle(driven)
    assert step(driven) == [2]
    assert driven.said(Phase) == [Phase((RequestId(1),), running=False), Phase((RequestId(2),), running=True)]
    assert (driven.core.running, driven.core.queued) == (1, 1)


def test_with_nothing_else_to_run_a_batch_goes_on() -> None:
    driven = short_turns(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    settle(driven)
    assert [step(driven) for _ in range(5)] == [[1]] * 5
    assert driven.core.counters.preemptions == 0 and driven.core.counters.switches == 1


def test_a_switch_says_how_long_it_waited_for_what() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    driven.complete(WEIGHTS)
    driven.complete(IN)
    assert driven.said(SwitchDone) == [SwitchDone(A.model, False, 0, STEP_NS, STEP_NS, A.manifest.image_bytes)]


# --- preparing the next turn -----------------------------------------------------------------------------------------


def test_the_next_turns_model_and_kv_come_in_while_this_one_decodes() -> None:
    driven = two_turns(20, A, B)
    assert driven.loads == [A.model, B.model] and driven.under_way(IN) == 1
    settle(driven)
    assert step(driven) == [2]
    (switch,) = driven.said(SwitchDone)
    assert switch.prefetched and switch.copy_ns == switch.kv_ns == 0
    assert driven.core.counters.prefetches == 1


def test_what_is_prepared_is_under_way_before_the_step_begins() -> None:
    driven = decode(A, B, pages=20)
    take(driven, 1, A)
    take(driven, 2, B)
    driven.complete(WEIGHTS)
    driven.complete(IN)
    kinds = [type(effect) for effect in driven.last]
    assert kinds[-1] is Run and {LoadWeights, CopyBlocks} <= set(kinds[:-1])


def test_nothing_is_prefetched_at_the_cost_of_the_running_batchs_growth() -> None:
    driven = two_turns(3 + 3 + 1)
    assert driven.loads == [WIDE.model], "its one block and the next model would leave no page"


def test_a_prefetch_evicts_what_is_needed_last() -> None:
    driven = short_turns(A, B, C, pages=3 + 3 + 3)
    for request, spec in enumerate((A, B, C), start=1):
        take(driven, request, spec)
    settle(driven)
    assert driven.loads == [A.model, B.model]
    assert step(driven) == [1]
    assert step(driven) == [2]
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)] and driven.loads[-1] == C.model


def test_one_model_is_fetched_at_a_time() -> None:
    driven = short_turns(A, B, C, pages=20)
    take(driven, 1, A)
    settle(driven)
    take(driven, 2, B)
    take(driven, 3, C)
    assert driven.loads == [A.model, B.model] and driven.under_way(IN) == 1, "the link is for what is needed first"
    driven.complete(PREFETCH)
    assert driven.loads == [A.model, B.model, C.model] and driven.under_way(IN) == 2


def test_a_load_that_nobody_waits_for_any_more_is_not_waited_for_by_the_next() -> None:
    driven = short_turns(A, B, pages=20)
    take(driven, 1, A)
    driven.on(Cancel(RequestId(1), 1))
    assert driven.asked(AbandonLoad) == [AbandonLoad(driven.asked(LoadWeights, driven.effects)[0].event)]
    take(driven, 2, B)
    settle(driven)
    assert running(driven) == [2] and not driven.core.ledger.weights.is_resident(A.model)


def test_of_what_nobody_waits_for_the_least_recently_used_leaves() -> None:
    driven = short_turns(A, B, C, pages=3 + 3 + 2)
    for request, spec in enumerate((A, B, A), start=1):
        take(driven, request, spec, max_tokens=2)
        settle(driven)
        step(driven)
    take(driven, 4, C)
    assert driven.asked(UnmapWeights) == [UnmapWeights(B.model)]


def test_latencies_are_learned_from_steps_and_loads() -> None:
    driven = decode(A, B, pages=20)
    take(driven, 1, A)
    driven.complete(WEIGHTS)
    driven.complete(IN)
    driven.stepped(2, after_ns=50_000_000)
    latency = driven.core._step_times.latency[A.model]
    assert latency.switch_ns() == pytest.approx(1_000_000, rel=0.1)
    assert latency.decode_ns(10) == pytest.approx(50_000_000, rel=0.1)


def test_a_prefetch_is_not_taken_for_a_measurement() -> None:
    """Its end is noticed when the step beside it is over."""
    driven = two_turns(20, A, B)
    before = driven.core._step_times.latency[B.model].switch_ns()
    driven.stepped(2, after_ns=50_000_000)
    settle(driven)
    while running(driven) != [2]:
        step(driven)
    assert driven.core._step_times.latency[B.model].switch_ns() == before
