"""The decode core, scripted: turns, continuous batching, preemption, the three rules, memory that lacks, endings."""

from __future__ import annotations

import pytest

from aegis.core.effects import (
    CopyBlocks,
    LoadWeights,
    RunDecode,
    StreamName,
    Track,
    UnmapWeights,
    Untrack,
)
from aegis.core.events import StepFailed
from aegis.core.ids import InstanceId, RequestId
from aegis.core.messages import (
    AddModel,
    Broken,
    Cancel,
    DropModel,
    ForgetPeer,
    GaveUp,
    KvReleased,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    NeedSlabs,
    PeerForgotten,
    Phase,
    ReturnSlabs,
    Shutdown,
    SwitchDone,
    Tokens,
)
from aegis.core.model import ModelSpec
from aegis.core.request import FinishReason, Token
from decode.core import DecodeCore
from decode.policy import WeightedRoundRobin
from decode.sequences import Where
from tests.sim.driven import PEER, PEER_WORD, Driven, adopt, decode, make_job
from tests.sim.pretended import PAGE, make_spec

A, B, C = (make_spec(i, image_pages=3, block_bytes=PAGE // 4) for i in range(3))
WIDE, WIDE_2 = (make_spec(i, image_pages=3, block_bytes=PAGE) for i in (8, 9))  # one block fills a slab
TWO_MODELS_FIT = 9  # pages: 3 + 3, and 3 slabs of KV
WEIGHTS, IN, OUT = StreamName.WEIGHTS, StreamName.SWAP_IN, StreamName.SWAP_OUT
STEP_NS = 1_000_000


def take(driven: Driven[DecodeCore], request: int, spec: ModelSpec, *, prompt: int = 10, max_tokens: int = 100) -> None:
    driven.on(adopt(make_job(request, spec, prompt=prompt, max_tokens=max_tokens), spec, first_block=100 * request))


def step(driven: Driven[DecodeCore], token: int = 2) -> list[int]:
    """One step ends; the requests whose rows run next."""
    rows = driven.asked(RunDecode, driven.effects)[-1].rows
    driven.stepped(*[token] * len(rows))
    return running(driven)


def running(driven: Driven[DecodeCore]) -> list[int]:
    return [row.request for run in driven.asked(RunDecode) for row in run.rows]


def settle(driven: Driven[DecodeCore]) -> None:
    """Whatever is under way completes."""
    while any(driven.under_way(stream) for stream in (WEIGHTS, OUT, IN)):
        for stream in (WEIGHTS, OUT, IN):
            if driven.under_way(stream):
                driven.complete(stream)


def short_turns(*specs: ModelSpec, pages: int, slabs: int | None = 64) -> Driven[DecodeCore]:
    """A turn is over after each step."""
    return decode(*specs, pages=pages, slabs=slabs, policy=WeightedRoundRobin(q_max_ns=1))


def two_turns(
    pages: int, first: ModelSpec = WIDE, second: ModelSpec = WIDE_2, *, slabs: int | None = 64
) -> Driven[DecodeCore]:
    """In a round of two: request 1 runs its step, request 2 of the other model has the next turn."""
    driven = short_turns(first, second, pages=pages, slabs=slabs)
    take(driven, 1, first)
    settle(driven)
    take(driven, 2, second)
    assert step(driven) == [1]
    return driven


# --- a sequence's way -------------------------------------------------------------------------------------------------


def test_a_sequence_goes_on_from_where_the_prefill_left_it() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    message = adopt(make_job(1, A, prompt=20), A, first_block=40)
    driven.on(message)
    assert driven.asked(Track) == [Track(message.job, (1,))] and driven.loads == [A.model]
    (copy,) = driven.asked(CopyBlocks)
    assert [a for a, _ in copy.pairs] == [40, 41], "KV and weights come side by side"
    driven.complete(WEIGHTS)
    driven.complete(IN)
    assert driven.said(KvReleased) == [KvReleased(RequestId(1), 1, message.kv)]
    (run,) = driven.asked(RunDecode)
    ((request, token, position, blocks),) = [(r.request, r.token, r.position, tuple(r.blocks)) for r in run.rows]
    assert (request, token, position) == (1, 1, 20) and blocks == tuple(b for _, b in copy.pairs)
    driven.stepped(5)
    assert driven.said(Tokens) == [Tokens(RequestId(1), 1, 1, (Token(5),))]
    (row,) = driven.asked(RunDecode)[0].rows
    assert (row.token, row.position) == (5, 21)


def test_rule_2_a_swap_in_waits_for_the_swap_out_of_the_peer() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    message = adopt(make_job(1, A), A, first_block=40)
    driven.on(message)
    driven.complete(WEIGHTS)
    (copy,) = driven.copies
    assert copy.after == message.kv.ready and copy.after.word == PEER_WORD


@pytest.mark.parametrize(("token", "reason"), [(7, FinishReason.STOP), (2, FinishReason.LENGTH)])
def test_the_last_token_ends_a_sequence_and_frees_all_it_held(token: int, reason: FinishReason) -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A, max_tokens=2)
    settle(driven)
    driven.stepped(token)
    assert driven.said(Tokens) == [Tokens(RequestId(1), 1, 1, (Token(token),), reason)]
    assert driven.asked(Untrack) == [Untrack(RequestId(1))] and not driven.asked(RunDecode)
    assert not driven.core.ledger.device.use() and not driven.core.ledger.host.use()
    assert driven.core.queued == driven.core.running == 0


def test_a_block_is_added_exactly_when_a_position_needs_it() -> None:
    driven = decode(WIDE, pages=TWO_MODELS_FIT)
    take(driven, 1, WIDE, prompt=14)
    settle(driven)
    rows = [driven.asked(RunDecode)[0].rows[0]]
    held = [len(rows[0].blocks)]
    for _ in range(3):
        step(driven)
        rows.append(driven.asked(RunDecode)[0].rows[0])
        held.append(len(rows[-1].blocks))
    assert [row.position for row in rows] == [14, 15, 16, 17] and held == [1, 1, 2, 2]


# --- continuous batching ----------------------------------------------------------------------------------------------


def test_new_ones_join_and_finished_ones_leave_between_steps() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A, max_tokens=3)
    settle(driven)
    take(driven, 2, A)
    assert step(driven) == [1]
    driven.complete(IN)
    assert step(driven) == [1, 2] or step(driven) == [2]
    while 1 in running(driven):
        step(driven)
    assert running(driven) == [2]


def test_rule_1_a_step_waits_for_its_own_kv_only() -> None:
    """Each sequence joins as soon as its own swap-in has passed."""
    driven = decode(A, pages=TWO_MODELS_FIT)
    for request in (1, 2, 3):
        take(driven, request, A)
    driven.complete(WEIGHTS)
    assert driven.under_way(IN) == 3 and not driven.asked(RunDecode)
    driven.complete(IN, 1)
    assert running(driven) == [1]
    driven.complete(IN, 1)
    assert step(driven) == [1, 2]
    driven.complete(IN, 1)
    assert step(driven) == [1, 2, 3]


def test_kv_is_released_to_its_owner_when_it_has_arrived_and_not_before() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    take(driven, 2, A)
    driven.complete(WEIGHTS)
    assert not driven.said(KvReleased, driven.effects)
    driven.complete(IN, 1)
    assert [message.request for message in driven.said(KvReleased)] == [1]


# --- turns ------------------------------------------------------------------------------------------------------------


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


# --- preparing the next turn ------------------------------------------------------------------------------------------


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
    assert kinds[-1] is RunDecode and {LoadWeights, CopyBlocks} <= set(kinds[:-1])


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


# --- preemption and memory --------------------------------------------------------------------------------------------


def test_kv_stays_on_the_device_while_there_is_room() -> None:
    driven = two_turns(20)
    settle(driven)
    for _ in range(6):
        step(driven)
    assert driven.core.counters.preemptions == 6
    assert driven.core.counters.swap_out_bytes == 0 and driven.under_way(IN) == 0


def test_kv_is_swapped_out_when_there_is_no_room_and_comes_back() -> None:
    driven = two_turns(4)
    driven.stepped(5)
    (out,) = driven.asked(CopyBlocks)
    assert out.stream is OUT and driven.core.counters.swap_out_bytes == PAGE
    settle(driven)
    assert running(driven) == [2]
    driven.stepped(6)
    settle(driven)
    assert running(driven) == [1]
    back = driven.copies[-1]
    assert [b for _, b in out.pairs] == [a for a, _ in back.pairs], "from where it was put"
    assert back.after == out.event, "rule 2"
    (row,) = driven.asked(RunDecode)[0].rows
    assert (row.token, row.position) == (5, 12), "exactly where it stopped"


def test_host_blocks_are_free_again_when_the_kv_is_back() -> None:
    driven = two_turns(4)
    held = []
    for _ in range(4):
        driven.stepped(5)
        settle(driven)
        held.append([driven.core.ledger.host.use()[s.manifest.kv].used for s in (WIDE,)])
    assert held == [[1]] * 4, "always that of the one that does not run"


def test_idle_weights_leave_before_kv_does() -> None:
    driven = two_turns(3 + 3 + 2)
    settle(driven)
    assert set(driven.core.ledger.weights.resident()) == {WIDE.model, WIDE_2.model}
    driven.on(Cancel(RequestId(2), 1))
    for _ in range(40):
        step(driven)
    assert driven.asked(UnmapWeights, driven.effects) == [UnmapWeights(WIDE_2.model)]
    assert driven.core.counters.swap_out_bytes == 0


def test_the_batch_whose_turn_is_furthest_gives_its_kv_away_first() -> None:
    """The order of turns is known, so the best choice is: the one that has just run, not the one longest unused."""
    driven = short_turns(WIDE, WIDE_2, A, pages=3 + 5)
    take(driven, 1, WIDE, prompt=20)
    settle(driven)
    take(driven, 2, WIDE_2, prompt=20)
    take(driven, 3, A, prompt=4 * 2 * 16)
    assert step(driven) == [1]
    for expected, elsewhere in ((2, {3}), (3, {2}), (1, {2}), (2, {1})):
        driven.stepped(2)
        settle(driven)
        assert running(driven) == [expected]
        sequences = driven.core._by_request.values()
        assert {s.job.request for s in sequences if s.where is Where.HOST} == elsewhere


def test_the_youngest_of_the_only_batch_makes_room_for_the_others() -> None:
    driven = decode(WIDE, pages=3 + 3, slabs=4)
    for request in (1, 2):
        take(driven, request, WIDE, prompt=15)
    settle(driven)
    while 2 in running(driven):
        step(driven)
    assert running(driven) == [1]
    for _ in range(20):
        step(driven)
        if driven.under_way(OUT):
            settle(driven)
    assert 2 not in running(driven)


def test_without_host_slabs_kv_is_given_up_and_the_request_prefilled_again() -> None:
    driven = two_turns(4, slabs=None)
    driven.stepped(5)
    assert driven.said(NeedSlabs) == [NeedSlabs(1)]
    assert not driven.said(GaveUp) and not driven.asked(RunDecode)
    driven.granted(refused=True)
    assert driven.said(GaveUp) == [GaveUp(RequestId(1), 1)]
    assert driven.asked(Untrack) == [Untrack(RequestId(1))]
    assert driven.core.counters.given_up == 1 and driven.under_way(WEIGHTS) == 1
    settle(driven)
    assert running(driven) == [2]


def test_slabs_are_asked_for_once() -> None:
    driven = two_turns(4, slabs=None)
    driven.stepped(5)
    take(driven, 3, WIDE_2)
    assert not driven.said(NeedSlabs)
    driven.granted(1)
    assert driven.under_way(OUT) == 1 and not driven.said(ReturnSlabs)


def test_slabs_that_are_not_needed_go_back_but_for_one() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, slabs=None)
    driven.granted(1, 2, 3)
    assert [len(message.slabs) for message in driven.said(ReturnSlabs)] == [2]


def test_a_refused_instance_keeps_no_slabs_from_others() -> None:
    """What it wished for stays remembered by the node; what lies idle here meanwhile goes back."""
    driven = two_turns(4, slabs=None)
    driven.stepped(5)
    driven.granted(refused=True)
    driven.granted(1, 2, 3)
    assert [len(message.slabs) for message in driven.said(ReturnSlabs)] == [2]


# --- cancellation -----------------------------------------------------------------------------------------------------


def test_cancelled_before_its_kv_was_asked_for() -> None:
    driven = two_turns(4)
    driven.on(Cancel(RequestId(2), 1))
    assert [message.request for message in driven.said(KvReleased)] == [2]
    assert driven.asked(Untrack) == [Untrack(RequestId(2))]


def test_cancelled_while_its_kv_arrives() -> None:
    """Rule 3: the blocks stay untouched, and the owner's are not released, until the copy has passed."""
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    driven.complete(WEIGHTS)
    driven.on(Cancel(RequestId(1), 1))
    assert not driven.said(KvReleased) and driven.core.ledger.device.use()[A.manifest.kv].moving == 1
    driven.complete(IN)
    assert [message.request for message in driven.said(KvReleased)] == [1]
    assert not driven.core.ledger.device.use()


def test_cancelled_in_the_middle_of_a_step() -> None:
    """The step still writes to its blocks: they are freed when it is over, and its token goes nowhere."""
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    take(driven, 2, A)
    settle(driven)
    assert step(driven) == [1, 2]
    driven.on(Cancel(RequestId(1), 1))
    assert driven.core.ledger.device.use()[A.manifest.kv].used == 2
    driven.stepped(3, 4)
    assert [message.request for message in driven.said(Tokens)] == [2] and running(driven) == [2]
    assert driven.core.ledger.device.use()[A.manifest.kv].used == 1


def test_a_step_that_failed_ends_its_requests_and_frees_their_memory() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    take(driven, 2, A)
    settle(driven)
    assert step(driven) == [1, 2]
    driven.on(Cancel(RequestId(1), 1))
    driven.on(StepFailed("why"))
    assert driven.said(Broken) == [Broken(RequestId(2), 1, "why")]
    assert not driven.core.ledger.device.use() and running(driven) == []


def test_cancelled_while_it_waits_on_the_device() -> None:
    driven = two_turns(20)
    settle(driven)
    assert step(driven) == [2]
    driven.on(Cancel(RequestId(1), 1))
    assert WIDE.manifest.kv not in driven.core.ledger.device.use() or (
        driven.core.ledger.device.use()[WIDE.manifest.kv].used == 1
    )


@pytest.mark.parametrize("copied", [False, True], ids=["during the copy", "after the copy"])
def test_cancelled_while_it_lies_in_the_host(copied: bool) -> None:
    driven = two_turns(4, slabs=4)
    driven.stepped(5)
    if copied:
        driven.complete(OUT)
    driven.on(Cancel(RequestId(1), 1))
    if not copied:
        assert driven.core.ledger.host.use()[WIDE.manifest.kv].moving == 1
        driven.complete(OUT)
    assert not driven.core.ledger.host.use()
    assert not driven.said(KvReleased)


def test_cancelled_while_its_saved_kv_comes_back() -> None:
    driven = two_turns(4, slabs=4)
    driven.stepped(5)
    settle(driven)
    driven.stepped(6)
    while not driven.under_way(IN):
        driven.complete(OUT if driven.under_way(OUT) else WEIGHTS)
    driven.on(Cancel(RequestId(1), 1))
    assert driven.core.ledger.host.use()[WIDE.manifest.kv].moving == 1
    settle(driven)
    driven.on(Cancel(RequestId(2), 1))
    settle(driven) if driven.under_way(IN) else driven.stepped(2)
    assert not driven.core.ledger.host.use() and not driven.core.ledger.device.use()


def test_a_cancellation_of_another_attempt_or_of_nobody_does_nothing() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    settle(driven)
    driven.on(Cancel(RequestId(1), 2))
    driven.on(Cancel(RequestId(9), 1))
    assert step(driven) == [1]


# --- peers ------------------------------------------------------------------------------------------------------------


def test_a_lost_peer_is_forgotten_after_the_last_copy_from_it() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    take(driven, 2, A)
    driven.complete(WEIGHTS)
    driven.complete(IN, 1)
    driven.on(ForgetPeer(PEER))
    assert not driven.said(PeerForgotten), "request 2 is still being read"
    driven.complete(IN)
    assert driven.said(PeerForgotten) == [PeerForgotten(PEER)]
    assert step(driven) == [1], "what had arrived goes on"


def test_what_had_not_arrived_from_a_lost_peer_is_dropped() -> None:
    driven = two_turns(4)
    driven.on(ForgetPeer(PEER))
    assert driven.said(PeerForgotten) == [PeerForgotten(PEER)] and driven.core.queued == 0
    assert driven.asked(Untrack) == [Untrack(RequestId(2))] and step(driven) == [1]


def test_each_question_about_a_peer_is_answered() -> None:
    """It was lost twice while a copy from it was under way."""
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    driven.complete(WEIGHTS)
    driven.on(ForgetPeer(PEER))
    driven.on(ForgetPeer(PEER))
    driven.on(ForgetPeer(InstanceId("prefill-3")))
    assert driven.said(PeerForgotten) == [PeerForgotten(InstanceId("prefill-3"))]
    driven.complete(IN)
    assert driven.said(PeerForgotten) == [PeerForgotten(PEER)] * 2


# --- models -----------------------------------------------------------------------------------------------------------


def test_models_come_and_go() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    assert driven.said(ModelAdded, driven.effects) == [ModelAdded(A.model)]
    take(driven, 1, A, max_tokens=2)
    settle(driven)
    driven.stepped(2)
    driven.on(DropModel(A.model))
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]
    assert driven.core.active is None and driven.core.ledger.pool.used == 0
    driven.on(AddModel(A))
    take(driven, 2, A)
    settle(driven)
    assert running(driven) == [2]


def test_a_model_is_dropped_when_it_has_loaded() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    driven.on(Cancel(RequestId(1), 1))
    driven.on(DropModel(A.model))
    assert not driven.said(ModelDropped)
    driven.complete(WEIGHTS)
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]


def test_a_model_is_dropped_after_the_step_that_uses_it() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    settle(driven)
    driven.on(Cancel(RequestId(1), 1))
    driven.on(DropModel(A.model))
    assert not driven.said(ModelDropped)
    driven.stepped(2)
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]


def test_dropping_a_model_that_could_not_be_added_is_answered() -> None:
    driven = decode(pages=8)
    driven.core.ledger._ranges.capacity = 2
    driven.on(AddModel(A))
    assert [message.model for message in driven.said(ModelFailed)] == [A.model]
    driven.on(DropModel(A.model))
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]


def test_latencies_are_learned_from_steps_and_loads() -> None:
    driven = decode(A, B, pages=20)
    take(driven, 1, A)
    driven.complete(WEIGHTS)
    driven.complete(IN)
    driven.stepped(2, after_ns=50_000_000)
    latency = driven.core._latency[A.model]
    assert latency.switch_ns() == pytest.approx(1_000_000, rel=0.1)
    assert latency.decode_ns(10) == pytest.approx(50_000_000, rel=0.1)


def test_a_prefetch_is_not_taken_for_a_measurement() -> None:
    """Its end is noticed when the step beside it is over."""
    driven = two_turns(20, A, B)
    before = driven.core._latency[B.model].switch_ns()
    driven.stepped(2, after_ns=50_000_000)
    settle(driven)
    while running(driven) != [2]:
        step(driven)
    assert driven.core._latency[B.model].switch_ns() == before


def test_what_is_not_for_a_core_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="not for a decode instance"):
        decode(pages=8).on(Shutdown())
