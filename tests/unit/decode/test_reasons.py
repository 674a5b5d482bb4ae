"""The reasons of turns if the policy gives none, and the moments at which they are shown."""

from __future__ import annotations

from msgspec.structs import replace

from aegis.core.decision import Decision, DecisionKind, Plan, Why
from aegis.core.effects import UnmapWeights
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import Cancel, GaveUp
from aegis.core.model import ModelSpec
from aegis.core.request import Job, Sampling
from aegis.core.views import BatchView, Turn
from aegis.sim.faults.fake_models import PAGE, make_spec
from decode.core import DecodeCore
from decode.policies.qlm import Qlm
from decode.policies.weighted_round_robin import WeightedRoundRobin
from decode.reasons import TurnReasons, why_turn
from tests.sim.driven import Driven, ledger
from tests.unit.decode.turns import TWO_MODELS_FIT, WIDE, WIDE_2, A, B, C, settle, step, take

_MS = 1_000_000
D = make_spec(3, image_pages=3, block_bytes=PAGE // 4)
ME = InstanceId("decode-0")
JOB = Job(RequestId(1), 1, ModelId("a"), (1,), Sampling(max_tokens=9), 0)
FIRST = BatchView(1, ModelId("a"), 10 * _MS, 100 * _MS, 450 * _MS, first_due_ns=900 * _MS, prefill_ns=300 * _MS)
SECOND = BatchView(2, ModelId("b"), 20 * _MS, 100 * _MS, 450 * _MS, due_ns=50 * _MS, resident=True)
PLAN = Plan((SECOND, FIRST), (Turn(1, 840 * _MS), Turn(2, None)), 100 * _MS)


def test_any_plan_is_explained_by_what_the_policy_saw() -> None:
    assert why_turn(PLAN, 0) == Why(
        "number 1 of 2 in the plan (first token due in 800 ms, prefill 300 ms, step 10 ms, weights 450 ms); "
        "next b (next token due 50 ms ago, step 20 ms)",
        slack_ns=40 * _MS,
        cost_ns=750 * _MS,
        lost="b",
        lost_slack_ns=-70 * _MS,
        lost_cost_ns=0,
    )
    assert why_turn(PLAN, 1).lost is None
    assert why_turn(replace_turns(Turn(2, None)), 0).because.startswith("nobody else has work (")


def replace_turns(*turns: Turn) -> Plan:
    return PLAN._replace(turns=turns)


def test_a_decision_says_who_has_the_turn_and_for_how_long() -> None:
    reasons = TurnReasons(ME, Qlm())
    told = reasons.decision(PLAN, 0, [JOB], 100 * _MS)
    assert (told.kind, told.model, told.requests) == (DecisionKind.TURN, "a", (1,))
    assert told.line.startswith("a has the turn for 840 ms: number 1 of 2 in the plan (")
    assert reasons.decision(PLAN, 1, [JOB], 150 * _MS).what == "b has the turn until it is done, as planned 50 ms ago"


def test_a_decision_says_which_priorities_moved_its_deadlines() -> None:
    jobs = [replace(JOB, request=RequestId(at), priority=priority) for at, priority in enumerate((2, 0, -1, 2))]
    reasons = TurnReasons(ME, Qlm())
    what = reasons.decision(PLAN, 1, jobs, 150 * _MS).what
    assert what == "b has the turn until it is done, as planned 50 ms ago, with requests of priority -1 and 2"
    pause = PLAN._replace(turns=(Turn(1, None, pause=True),))
    assert reasons.decision(pause, 0, jobs[3:], 100 * _MS).what.endswith(", with requests of priority 2")


def test_a_pause_says_what_it_is_for() -> None:
    reasons, turns = TurnReasons(ME, Qlm()), (Turn(2, _MS, pause=True), Turn(1, None))
    why = reasons.decision(PLAN._replace(turns=turns), 0, [JOB], 100 * _MS).line
    assert why == "b has a step in a pause of another turn: its streams have had no token for half of their gap"
    loading = replace(FIRST, turn_ns=0, resident=True)
    plan = PLAN._replace(batches=(replace(SECOND, there=True), loading), turns=turns)
    why = reasons.decision(plan, 0, [JOB], 100 * _MS).line
    assert why == "b has steps in a pause of another turn: the weights of a are on their way"


def test_round_robin_tells_what_its_quota_comes_from() -> None:
    told = WeightedRoundRobin(q_max_ns=2000 * _MS).why_turn(PLAN, 1)
    expected = (
        "turn 2 of 2; a step takes 20% of the time between two tokens, switches take 900 ms of a round, Q_MAX is 2 s"
    )
    assert told.because == expected


# --- the core ---------------------------------------------------------------------------------------------------------


def explaining(*, explains: bool = True) -> Driven[DecodeCore]:
    """A turn is over after each step."""
    policy = WeightedRoundRobin(q_max_ns=1)
    core = DecodeCore(ME, ledger(20), policy, Hardware(), explains=explains)
    return Driven(core, (A, B), slabs=64)


def told(driven: Driven[DecodeCore]) -> list[tuple[str, tuple[RequestId, ...]]]:
    return [(each.model, each.requests) for each in driven.asked(Decision, driven.effects)]


def test_each_turn_that_is_given_is_explained_with_its_requests() -> None:
    driven = explaining()
    take(driven, 1, A)
    take(driven, 2, B)
    settle(driven)
    step(driven)
    step(driven)
    told_of = [(A.model, (1,)), (A.model, (1,)), (B.model, (2,))]
    assert told(driven)[:3] == told_of, "a has the first turn of a round when it is alone, and of the next one"


def test_nothing_is_where_there_was_no_choice_or_nobody_asked() -> None:
    driven, silent = explaining(), explaining(explains=False)
    for each in (driven, silent):
        take(each, 1, A)
        settle(each)
        step(each)
        step(each)
    assert told(driven) == [(A.model, (1,))]
    assert told(silent) == []
    assert [e for e in driven.effects if not isinstance(e, Decision)] == silent.effects


# --- what leaves the device -------------------------------------------------------------------------------------------


def of_kind(driven: Driven[DecodeCore], kind: DecisionKind) -> list[Decision]:
    return [each for each in driven.asked(Decision, driven.effects) if each.kind is kind]


def crowded(pages: int, *specs: ModelSpec, slabs: int | None = 64, explains: bool = True) -> Driven[DecodeCore]:
    """A turn is over after each step; a request of each model, and turns of all of them. Model D is known, too."""
    core = DecodeCore(ME, ledger(pages), WeightedRoundRobin(q_max_ns=1), Hardware(), explains=explains)
    driven = Driven(core, (*specs, D), slabs=slabs)
    for number, spec in enumerate(specs, start=1):
        take(driven, number, spec)
        settle(driven)
    for _ in range(2 * len(specs)):
        step(driven)
        settle(driven)
    return driven


def test_weights_that_leave_are_told_with_their_next_use_and_who_stays() -> None:
    driven = crowded(TWO_MODELS_FIT, A, B, C)
    evicted = [effect.model for effect in driven.asked(UnmapWeights, driven.effects)]
    told = of_kind(driven, DecisionKind.EVICT)
    assert evicted and [each.model for each in told if each.what.startswith("weights of ")] == evicted
    first = told[0]
    assert first.what == f"weights of {A.model} leave for {C.model}"
    assert first.why.because.startswith("its turn is number ") and first.requests == (1,)
    assert first.why.cost_ns is not None and first.why.cost_ns > 0, "what it takes to come back"


def test_the_spared_model_is_named_where_one_was() -> None:
    driven = crowded(4 * 3, A, B, C)
    for number in (1, 2):
        driven.on(Cancel(RequestId(number), 1))
    take(driven, 9, D)
    settle(driven)
    (told,) = of_kind(driven, DecisionKind.EVICT)
    assert (
        told.line
        == f"weights of {A.model} leave for {D.model}: nobody waits for it; {B.model} stays, nobody waits for it"
    )
    assert (told.requests, told.why.lost, told.why.slack_ns) == ((), B.model, None)


def test_kv_that_moves_out_is_told_with_its_requests() -> None:
    driven = crowded(4, WIDE, WIDE_2)
    moved = [each for each in of_kind(driven, DecisionKind.EVICT) if each.what.startswith("KV of ")]
    assert moved[0].what == f"KV of 1 request of {WIDE.model} moves to host memory for {WIDE_2.model}"
    assert moved[0].requests == (1,)
    assert moved[0].why.because.startswith("of what is on the device it is needed last, ")


def test_who_is_given_up_for_lack_of_memory_is_told_why() -> None:
    driven = crowded(4, WIDE, WIDE_2, slabs=0)
    (told,) = of_kind(driven, DecisionKind.REFUSE)
    assert driven.said(GaveUp, driven.effects) == [GaveUp(told.requests[0], 1)]
    assert told.line.endswith(
        ": its KV has to leave the device, and the host has no slab for it; it is to be prefilled again"
    )


def test_what_leaves_is_the_same_where_nobody_asks() -> None:
    told, silent = (crowded(4, WIDE, WIDE_2, explains=explains) for explains in (True, False))
    assert [effect for effect in told.effects if not isinstance(effect, Decision)] == silent.effects
