"""The prefill core, scripted: order, prefetch, hand-over, cancellation in each phase, memory that lacks."""

from __future__ import annotations

import pytest

from aegis.core.effects import (
    CopyBlocks,
    LoadWeights,
    MapWeights,
    RunPrefill,
    StreamName,
    Unbind,
    UnmapWeights,
    Untrack,
)
from aegis.core.events import StepFailed, Stepped
from aegis.core.ids import InstanceId, RequestId
from aegis.core.messages import (
    AddModel,
    Broken,
    Cancel,
    DropModel,
    ForgetPeer,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    NeedSlabs,
    PeerForgotten,
    Prefilled,
    PromptLogprobs,
    ReleaseKv,
    ReturnSlabs,
    Shutdown,
    Started,
    Submit,
    SwitchDone,
    Tokens,
)
from aegis.core.request import FinishReason, Job, Token
from prefill.core import PrefillCore
from tests.sim.driven import Driven, ledger, make_job, prefill
from tests.sim.pretended import PAGE, make_spec

A, B, C = (make_spec(i, image_pages=3, block_bytes=PAGE // 4) for i in range(3))
WIDE = make_spec(8, image_pages=3, block_bytes=PAGE)  # one block fills a slab
TWO_MODELS_FIT = 8  # pages: 3 + 3, and 2 slabs of KV
WEIGHTS, OUT = StreamName.WEIGHTS, StreamName.SWAP_OUT


def ran(driven: Driven[PrefillCore]) -> list[int]:
    return [effect.job.request for effect in driven.asked(RunPrefill, driven.effects)]


def finish(driven: Driven[PrefillCore], token: int = 1) -> None:
    """The running job's step ends and its KV leaves."""
    driven.stepped(token)
    if driven.under_way(OUT):
        driven.complete(OUT)


# --- a job's way ------------------------------------------------------------------------------------------------------


def test_a_job_is_loaded_for_run_and_handed_over() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    job = make_job(1, A, prompt=20)
    driven.on(Submit(job, 1))
    assert [type(effect) for effect in driven.last] == [MapWeights, LoadWeights]
    driven.complete(WEIGHTS)
    assert driven.said(Started) == [Started(job.request, 1)]
    assert driven.said(SwitchDone) == [SwitchDone(A.model, False, 0, 1_000_000, 0, A.manifest.image_bytes)]
    (run,) = driven.asked(RunPrefill)
    assert run.job == job and len(run.blocks) == 2
    driven.stepped(5, after_ns=700)
    (copy,) = driven.asked(CopyBlocks)
    (prefilled,) = driven.said(Prefilled)
    assert tuple(a for a, _ in copy.pairs) == run.blocks
    assert prefilled.kv.blocks == tuple(b for _, b in copy.pairs)
    assert (prefilled.kv.owner, prefilled.kv.tokens, prefilled.kv.ready) == ("prefill-0", 20, copy.event)
    assert (prefilled.token, prefilled.duration_ns) == (Token(5), 700)
    assert driven.last.index(copy) < driven.last.index(
        next(e for e in driven.last if prefilled in driven.said(Prefilled, [e]))
    )
    assert Untrack(job.request) in driven.last


def test_rule_3_blocks_that_leave_are_not_used_until_they_have_left() -> None:
    driven = prefill(WIDE, pages=4)
    driven.on(Submit(make_job(1, WIDE), 1))
    driven.on(Submit(make_job(2, WIDE), 1))
    driven.complete(WEIGHTS)
    driven.stepped(5)
    assert ran(driven) == [1], "the one page left still feeds the copy"
    driven.complete(OUT)
    assert ran(driven) == [1, 2]


@pytest.mark.parametrize("copied", [True, False], ids=["after the copy", "during the copy"])
def test_kv_that_was_handed_over_stays_until_it_is_released(copied: bool) -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.complete(WEIGHTS)
    driven.stepped(5)
    if copied:
        driven.complete(OUT)
    host = driven.core.ledger.host
    assert host.use()[A.manifest.kv].used == 1 and driven.core.handed == 1
    driven.on(ReleaseKv(RequestId(1), 1))
    assert driven.core.handed == 0
    if not copied:
        assert host.use()[A.manifest.kv].moving == 1, "the copy still writes there"
        driven.complete(OUT)
    assert not host.use() and not driven.core.ledger.device.use()


def test_a_handle_is_released_once() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.complete(WEIGHTS)
    finish(driven)
    driven.on(ReleaseKv(RequestId(1), 1))
    with pytest.raises(KeyError):
        driven.on(ReleaseKv(RequestId(1), 1))


@pytest.mark.parametrize(
    ("job", "token", "reason"),
    [
        (make_job(1, A, max_tokens=1), 5, FinishReason.LENGTH),
        (make_job(1, A, max_tokens=9, sent=tuple(range(8))), 5, FinishReason.LENGTH),
        (make_job(1, A, max_tokens=9), 7, FinishReason.STOP),
    ],
    ids=["one token wanted", "all but one sent before", "stop token"],
)
def test_a_first_token_that_is_the_last_hands_nothing_over(job: Job, token: int, reason: FinishReason) -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(job, 1))
    driven.complete(WEIGHTS)
    driven.stepped(token)
    assert driven.said(Tokens) == [Tokens(job.request, 1, len(job.sent), (Token(token),), reason)]
    assert not driven.said(Prefilled) and not driven.asked(CopyBlocks)
    assert not driven.core.ledger.host.use() and not driven.core.ledger.device.use()


def test_a_job_that_ends_with_its_first_token_needs_no_host_slab() -> None:
    driven = prefill(WIDE, pages=8, slabs=0)
    driven.on(Submit(make_job(1, WIDE, prompt=40, max_tokens=1), 1))
    driven.complete(WEIGHTS)
    assert ran(driven) == [1] and not driven.said(NeedSlabs, driven.effects)


def test_a_replay_prefills_what_was_sent_with_the_prompt() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A, prompt=10, sent=(3,) * 10, attempt=2), 1))
    driven.complete(WEIGHTS)
    assert len(driven.asked(RunPrefill)[0].blocks) == 2
    driven.stepped(5)
    (prefilled,) = driven.said(Prefilled)
    assert (prefilled.attempt, prefilled.kv.tokens) == (2, 20)


def test_logprobs_of_the_prompt_come_before_the_first_token() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.complete(WEIGHTS)
    prompt = (Token(2, -1.0), Token(3, -2.0))
    driven.on(Stepped((Token(5),), 1, prompt))
    assert driven.said(PromptLogprobs) == [PromptLogprobs(RequestId(1), 1, prompt)]
    said = driven.said(object)
    assert said.index(driven.said(PromptLogprobs)[0]) < said.index(driven.said(Prefilled)[0])


# --- order ------------------------------------------------------------------------------------------------------------


def test_groups_run_in_order_and_jobs_in_order_within() -> None:
    driven = prefill(A, B, pages=TWO_MODELS_FIT)
    for request, spec, group in [(1, A, 1), (2, B, 2), (3, A, 1), (4, A, 3), (5, B, 2)]:
        driven.on(Submit(make_job(request, spec), group))
    driven.complete(WEIGHTS)
    for _ in range(5):
        if driven.under_way(WEIGHTS):
            driven.complete(WEIGHTS)
        finish(driven)
    assert ran(driven) == [1, 3, 2, 5, 4]


def test_who_joins_the_front_group_while_its_last_job_runs_is_next() -> None:
    """Algorithm 1 sees the group in front until that job is done."""
    driven = prefill(A, B, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, B), 2))
    driven.complete(WEIGHTS)
    driven.complete(WEIGHTS)
    driven.on(Submit(make_job(3, A), 1))
    finish(driven)
    assert ran(driven) == [1, 3]


def test_one_job_runs_at_a_time() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, A), 1))
    driven.complete(WEIGHTS)
    assert (ran(driven), driven.core.running, driven.core.queued) == ([1], 1, 1)
    driven.on(Submit(make_job(3, A), 1))
    assert ran(driven) == [1]


# --- prefetch ---------------------------------------------------------------------------------------------------------


def test_the_next_groups_model_comes_in_while_this_one_prefills() -> None:
    driven = prefill(A, B, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, B), 2))
    driven.complete(WEIGHTS)
    assert driven.loads == [A.model, B.model]
    assert isinstance(driven.last[-1], RunPrefill), "the copy is under way when the step begins"
    driven.complete(WEIGHTS)
    finish(driven)
    assert ran(driven) == [1, 2]
    (switch,) = [s for s in driven.said(SwitchDone, driven.effects) if s.model == B.model]
    assert switch.prefetched and (switch.make_room_ns, switch.copy_ns) == (0, 0)
    assert driven.core.counters.prefetches == 1 and driven.core.counters.switches == 2


def test_prefetching_evicts_only_models_that_nobody_waits_for() -> None:
    driven = prefill(A, B, C, pages=TWO_MODELS_FIT)
    for request, spec in enumerate((A, B), start=1):
        driven.on(Submit(make_job(request, spec), request))
        driven.complete(WEIGHTS)
        finish(driven)
    assert set(driven.core.ledger.weights.resident()) == {A.model, B.model}
    driven.on(Submit(make_job(3, B), 3))
    driven.on(Submit(make_job(4, C), 4))
    assert driven.loads == [A.model, B.model, C.model], "A is not needed"
    driven.complete(WEIGHTS)
    driven.on(Submit(make_job(5, A), 5))
    assert driven.loads == [A.model, B.model, C.model], "B runs and C is next"


def test_prefetching_takes_nothing_from_a_model_that_somebody_waits_for() -> None:
    driven = prefill(A, B, C, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, C), 1))
    driven.complete(WEIGHTS)
    finish(driven)
    for request, spec in enumerate((A, B, C), start=2):
        driven.on(Submit(make_job(request, spec), request))
    driven.complete(WEIGHTS)
    assert ran(driven) == [1, 2] and driven.loads == [C.model, A.model], "C stays, though B comes before it"
    finish(driven)
    assert driven.asked(UnmapWeights, driven.effects) == [UnmapWeights(A.model)]


def test_prefetching_leaves_room_for_the_running_groups_kv() -> None:
    """Else the model would be evicted for the next job, and brought in again while that one runs, and so on."""
    driven = prefill(WIDE, B, pages=3 + 3 + 2)
    driven.on(Submit(make_job(1, WIDE, prompt=16), 1))
    driven.on(Submit(make_job(2, WIDE, prompt=32), 1))
    driven.on(Submit(make_job(3, B), 2))
    driven.complete(WEIGHTS)
    assert driven.loads == [WIDE.model]
    finish(driven)
    assert driven.loads == [WIDE.model, B.model], "nobody of this group is left"


def test_one_model_is_brought_in_at_a_time() -> None:
    driven = prefill(A, B, C, pages=20)
    for request, spec in enumerate((A, B, C), start=1):
        driven.on(Submit(make_job(request, spec), request))
    driven.complete(WEIGHTS)
    assert driven.loads == [A.model, B.model]
    driven.complete(WEIGHTS)
    assert driven.loads == [A.model, B.model], "B comes next, C is not needed yet"


# --- memory that lacks ------------------------------------------------------------------------------------------------


def test_idle_weights_make_room_for_kv() -> None:
    driven = prefill(A, WIDE, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.complete(WEIGHTS)
    finish(driven)
    driven.on(Submit(make_job(2, WIDE, prompt=48), 2))
    driven.complete(WEIGHTS)
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)]
    assert ran(driven) == [1, 2]


def test_models_needed_last_leave_first() -> None:
    driven = prefill(A, B, C, pages=TWO_MODELS_FIT)
    for request, spec in enumerate((A, B), start=1):
        driven.on(Submit(make_job(request, spec), request))
        driven.complete(WEIGHTS)
        finish(driven)
    driven.on(Submit(make_job(3, C, prompt=10), 3))
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)], "of two that nobody needs the first by name"
    driven.on(Submit(make_job(4, A), 4))
    driven.complete(WEIGHTS)
    finish(driven)
    driven.complete(WEIGHTS)
    assert driven.asked(UnmapWeights, driven.effects)[1:] == [UnmapWeights(B.model)]


def test_a_lack_of_host_slabs_is_asked_for_once_and_waited_out() -> None:
    driven = prefill(WIDE, pages=8, slabs=None)
    driven.granted(0)
    driven.on(Submit(make_job(1, WIDE, prompt=48), 1))
    driven.complete(WEIGHTS)
    assert driven.said(ReturnSlabs)[0].slabs == (0,), "who waits holds nothing idle"
    assert driven.said(NeedSlabs) == [NeedSlabs(3)]
    driven.granted(refused=True)
    driven.on(Submit(make_job(2, WIDE), 1))
    assert not driven.said(NeedSlabs) and ran(driven) == []
    driven.granted(4, 5, 6)
    assert ran(driven) == [1]


def test_surplus_slabs_go_back_but_for_one() -> None:
    driven = prefill(WIDE, pages=8, slabs=None)
    driven.granted(0, 1, 2)
    assert [len(message.slabs) for message in driven.said(ReturnSlabs)] == [2]


def test_slabs_granted_too_late_go_back() -> None:
    driven = prefill(WIDE, pages=8, slabs=None)
    driven.on(Submit(make_job(1, WIDE, prompt=48), 1))
    driven.complete(WEIGHTS)
    driven.on(Cancel(RequestId(1), 1))
    driven.granted(1, 2, 3)
    assert [len(message.slabs) for message in driven.said(ReturnSlabs)] == [2]


# --- cancellation -----------------------------------------------------------------------------------------------------


def test_a_waiting_job_is_cancelled() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, A), 1))
    driven.on(Cancel(RequestId(1), 1))
    driven.complete(WEIGHTS)
    assert ran(driven) == [2]


def test_a_running_job_is_cancelled_when_its_step_ends() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.complete(WEIGHTS)
    driven.on(Cancel(RequestId(1), 1))
    driven.stepped(5)
    assert driven.said(object) == [] and driven.asked(Untrack) == [Untrack(RequestId(1))]
    assert not driven.core.ledger.device.use() and not driven.core.ledger.host.use()


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_step_that_failed_ends_its_request_and_nothing_else(cancelled: bool) -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, A), 1))
    driven.complete(WEIGHTS)
    if cancelled:
        driven.on(Cancel(RequestId(1), 1))
    driven.on(StepFailed("why"))
    assert driven.said(Broken) == ([] if cancelled else [Broken(RequestId(1), 1, "why")])
    assert driven.asked(Untrack) == [Untrack(RequestId(1))] and ran(driven) == [1, 2]


def test_what_was_handed_over_is_not_freed_by_a_cancellation() -> None:
    """The proxy hears of the handle after it sent the cancellation, and releases it then."""
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.complete(WEIGHTS)
    finish(driven)
    driven.on(Cancel(RequestId(1), 1))
    assert driven.core.handed == 1
    driven.on(ReleaseKv(RequestId(1), 1))
    assert driven.core.handed == 0


@pytest.mark.parametrize("phase", ["waiting", "running"])
def test_a_cancellation_of_another_attempt_does_nothing(phase: str) -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A, attempt=2), 1))
    if phase == "running":
        driven.complete(WEIGHTS)
    driven.on(Cancel(RequestId(1), 1))
    if phase == "waiting":
        driven.complete(WEIGHTS)
    driven.stepped(5)
    assert driven.said(Prefilled)[0].attempt == 2


def test_a_cancelled_groups_model_is_no_longer_waited_for() -> None:
    driven = prefill(A, B, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, B), 2))
    driven.on(Cancel(RequestId(1), 1))
    assert driven.loads == [A.model, B.model]
    driven.complete(WEIGHTS)
    assert ran(driven) == [2]


# --- models, peers, telemetry -----------------------------------------------------------------------------------------


def test_models_come_and_go() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    assert driven.said(ModelAdded, driven.effects) == [ModelAdded(A.model)]
    driven.on(DropModel(A.model))
    assert driven.asked(Unbind) and driven.said(ModelDropped) == [ModelDropped(A.model)]
    driven.on(AddModel(A))
    assert driven.said(ModelAdded) == [ModelAdded(A.model)]


def test_a_model_is_dropped_when_nothing_works_on_it_any_more() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Cancel(RequestId(1), 1))
    driven.on(DropModel(A.model))
    assert not driven.said(ModelDropped), "it is the target of a copy"
    driven.complete(WEIGHTS)
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]
    assert driven.core.ledger.pool.used == 0


def test_a_model_is_dropped_after_the_step_that_uses_it() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.complete(WEIGHTS)
    driven.on(Cancel(RequestId(1), 1))
    driven.on(DropModel(A.model))
    assert not driven.said(ModelDropped) and driven.core.active == A.model
    driven.stepped(5)
    assert driven.said(ModelDropped) == [ModelDropped(A.model)] and driven.core.active is None


def test_a_model_whose_kv_was_handed_over_can_be_dropped() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.complete(WEIGHTS)
    driven.stepped(5)
    driven.on(DropModel(A.model))
    assert driven.said(ModelDropped)
    driven.complete(OUT)
    driven.on(ReleaseKv(RequestId(1), 1))
    assert not driven.core.ledger.host.use()


def test_dropping_a_model_that_could_not_be_added_is_answered() -> None:
    driven = Driven(PrefillCore(InstanceId("prefill-0"), ledger(8)), [], slabs=0)
    driven.core.ledger._ranges.capacity = 2
    driven.on(AddModel(A))
    assert [message.model for message in driven.said(ModelFailed)] == [A.model]
    driven.on(DropModel(A.model))
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]


def test_a_peer_is_forgotten_at_once() -> None:
    driven = prefill(pages=8)
    driven.on(ForgetPeer(InstanceId("decode-0")))
    assert driven.said(PeerForgotten) == [PeerForgotten(InstanceId("decode-0"))]


def test_a_switch_says_how_long_it_waited_for_what() -> None:
    driven = prefill(WIDE, pages=8, slabs=None)
    driven.on(Submit(make_job(1, WIDE), 1))
    driven.complete(WEIGHTS)
    driven.granted(refused=True)
    driven.granted(1)
    (switch,) = driven.said(SwitchDone)
    assert (switch.make_room_ns, switch.copy_ns, switch.kv_ns) == (0, 1_000_000, 2_000_000)


def test_a_model_that_was_evicted_meanwhile_is_switched_to_again() -> None:
    driven = prefill(A, WIDE, pages=4)
    for request, spec in enumerate((A, WIDE, A), start=1):
        driven.on(Submit(make_job(request, spec), request))
        driven.complete(WEIGHTS)
        finish(driven)
    switches = [message.model for message in driven.said(SwitchDone, driven.effects)]
    assert switches == [A.model, WIDE.model, A.model] == driven.loads
    assert driven.core.counters.switches == 3


def test_counters() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A, prompt=20), 1))
    driven.complete(WEIGHTS)
    finish(driven)
    counters = driven.core.counters
    assert (counters.prefills, counters.prompt_tokens) == (1, 20)
    assert counters.swap_out_bytes == 2 * A.manifest.kv.block_bytes


def test_what_is_not_for_a_core_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="not for a prefill instance"):
        prefill(pages=8).on(Shutdown())
