"""The prefill core, scripted: order, hand-over, cancellation in each phase, models that come and go."""

from __future__ import annotations

import pytest

from aegis.core.block_runs import count_blocks
from aegis.core.effects import (
    CopyBlocks,
    LoadWeights,
    MapWeights,
    Unbind,
    Untrack,
)
from aegis.core.events import StepFailed, Stepped
from aegis.core.ids import InstanceId, ProxyId, RequestId, nth_request
from aegis.core.messages import (
    AddModel,
    Broken,
    Cancel,
    DropModel,
    DropProxy,
    ForgetPeer,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    NeedSlabs,
    PeerForgotten,
    Prefilled,
    PromptLogprobs,
    ProxyDropped,
    ReleaseKv,
    ReleaseProxy,
    Shutdown,
    Started,
    Submit,
    SwitchDone,
    Tokens,
)
from aegis.core.request import FinishReason, Job, Token
from prefill.core import PrefillCore
from tests.sim.driven import Driven, ledger, make_job, prefill, sides
from tests.unit.prefill.jobs import OUT, PREFETCH, TWO_MODELS_FIT, WEIGHTS, WIDE, A, B, finish, loaded, ran

# --- a job's way -----------------------------------------------------------------------------------------------------


def test_a_job_is_loaded_for_run_and_handed_over() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    job = make_job(1, A, prompt=20)
    driven.on(Submit(job, 1))
    assert [type(effect) for effect in driven.last] == [MapWeights, LoadWeights]
    loaded(driven)
    assert driven.said(Started) == [Started(job.request, 1)]
    assert driven.said(SwitchDone) == [SwitchDone(A.model, False, 0, 1_000_000, 0, A.manifest.image_bytes)]
    (run,) = driven.prompts()
    assert run.job == job and count_blocks(run.blocks) == 2
    driven.stepped(5, after_ns=700)
    (copy,) = driven.asked(CopyBlocks)
    (prefilled,) = driven.said(Prefilled)
    assert sides(copy) == (run.blocks, prefilled.kv.blocks)
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
    loaded(driven)
    driven.stepped(5)
    assert ran(driven) == [1], "the one page left still feeds the copy"
    driven.complete(OUT)
    assert ran(driven) == [1, 2]


@pytest.mark.parametrize("copied", [True, False], ids=["after the copy", "during the copy"])
def test_kv_that_was_handed_over_stays_until_it_is_released(copied: bool) -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    loaded(driven)
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
    loaded(driven)
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
    loaded(driven)
    driven.stepped(token)
    assert driven.said(Tokens) == [Tokens(job.request, 1, len(job.sent), (Token(token),), reason)]
    assert not driven.said(Prefilled) and not driven.asked(CopyBlocks)
    assert not driven.core.ledger.host.use() and not driven.core.ledger.device.use()


def test_a_job_that_ends_with_its_first_token_needs_no_host_slab() -> None:
    driven = prefill(WIDE, pages=8, slabs=0)
    driven.on(Submit(make_job(1, WIDE, prompt=40, max_tokens=1), 1))
    loaded(driven)
    assert ran(driven) == [1] and not driven.said(NeedSlabs, driven.effects)


def test_a_replay_prefills_what_was_sent_with_the_prompt() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A, prompt=10, sent=(3,) * 10, attempt=2), 1))
    loaded(driven)
    assert count_blocks(driven.prompts()[0].blocks) == 2
    driven.stepped(5)
    (prefilled,) = driven.said(Prefilled)
    assert (prefilled.attempt, prefilled.kv.tokens) == (2, 20)


def test_logprobs_of_the_prompt_come_before_the_first_token() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    loaded(driven)
    prompt = (Token(2, -1.0), Token(3, -2.0))
    driven.on(Stepped(((Token(5),),), 1, prompt))
    assert driven.said(PromptLogprobs) == [PromptLogprobs(RequestId(1), 1, prompt)]
    said = driven.said(object)
    assert said.index(driven.said(PromptLogprobs)[0]) < said.index(driven.said(Prefilled)[0])


# --- order -----------------------------------------------------------------------------------------------------------


def test_groups_run_in_order_and_jobs_in_order_within() -> None:
    driven = prefill(A, B, pages=TWO_MODELS_FIT)
    for request, spec, group in [(1, A, 1), (2, B, 2), (3, A, 1), (4, A, 3), (5, B, 2)]:
        driven.on(Submit(make_job(request, spec), group))
    loaded(driven)
    for _ in range(5):
        if driven.under_way(WEIGHTS) or driven.under_way(PREFETCH):
            loaded(driven)
        finish(driven)
    assert ran(driven) == [1, 3, 2, 5, 4]


def test_who_joins_the_front_group_while_its_last_job_runs_is_next() -> None:
    """Algorithm 1 sees the group in front until that job is done."""
    driven = prefill(A, B, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, B), 2))
    loaded(driven)
    loaded(driven)
    driven.on(Submit(make_job(3, A), 1))
    finish(driven)
    assert ran(driven) == [1, 3]


def test_one_job_runs_at_a_time() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, A), 1))
    loaded(driven)
    assert (ran(driven), driven.core.running, driven.core.queued) == ([1], 1, 1)
    driven.on(Submit(make_job(3, A), 1))
    assert ran(driven) == [1]


# --- cancellation ----------------------------------------------------------------------------------------------------


def test_a_waiting_job_is_cancelled() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, A), 1))
    driven.on(Cancel(RequestId(1), 1))
    loaded(driven)
    assert ran(driven) == [2]


def test_a_running_job_is_cancelled_when_its_step_ends() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    loaded(driven)
    driven.on(Cancel(RequestId(1), 1))
    driven.stepped(5)
    assert driven.said(object) == [] and driven.asked(Untrack) == [Untrack(RequestId(1))]
    assert not driven.core.ledger.device.use() and not driven.core.ledger.host.use()


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_step_that_failed_ends_its_request_and_nothing_else(cancelled: bool) -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, A), 1))
    loaded(driven)
    if cancelled:
        driven.on(Cancel(RequestId(1), 1))
    driven.on(StepFailed("why"))
    assert driven.said(Broken) == ([] if cancelled else [Broken(RequestId(1), 1, "why")])
    assert driven.asked(Untrack) == [Untrack(RequestId(1))] and ran(driven) == [1, 2]


def test_what_was_handed_over_is_not_freed_by_a_cancellation() -> None:
    """The proxy hears of the handle after it sent the cancellation, and releases it then."""
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    loaded(driven)
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
        loaded(driven)
    driven.on(Cancel(RequestId(1), 1))
    if phase == "waiting":
        loaded(driven)
    driven.stepped(5)
    assert driven.said(Prefilled)[0].attempt == 2


def test_a_cancelled_groups_model_is_no_longer_waited_for() -> None:
    driven = prefill(A, B, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, B), 2))
    driven.on(Cancel(RequestId(1), 1))
    assert driven.loads == [A.model, B.model]
    loaded(driven)
    assert ran(driven) == [2]


# --- models, peers, telemetry ----------------------------------------------------------------------------------------


def test_models_come_and_go() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    assert driven.said(ModelAdded, driven.effects) == [ModelAdded(A.model)]
    driven.on(DropModel(A.model))
    assert driven.asked(Unbind) and driven.said(ModelDropped) == [ModelDropped(A.model)]
    driven.on(AddModel(A))
    assert driven.said(ModelAdded) == [ModelAdded(A.model)]


def test_a_job_of_a_model_that_was_dropped_ends() -> None:
    """Who sent it had not learned that yet."""
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(DropModel(A.model))
    driven.on(Submit(make_job(1, A), 1))
    assert [broken.request for broken in driven.said(Broken)] == [1] and driven.core.queued == 0


def test_a_model_is_dropped_when_nothing_works_on_it_any_more() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Cancel(RequestId(1), 1))
    driven.on(DropModel(A.model))
    assert not driven.said(ModelDropped), "it is the target of a copy"
    loaded(driven)
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]
    assert driven.core.ledger.pool.used == 0


def test_a_model_is_dropped_after_the_step_that_uses_it() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    loaded(driven)
    driven.on(Cancel(RequestId(1), 1))
    driven.on(DropModel(A.model))
    assert not driven.said(ModelDropped) and driven.core.active == A.model
    driven.stepped(5)
    assert driven.said(ModelDropped) == [ModelDropped(A.model)] and driven.core.active is None


def test_a_model_whose_kv_was_handed_over_can_be_dropped() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    loaded(driven)
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
    driven.on(ForgetPeer(InstanceId("decode-0"), (7,)))
    assert driven.said(PeerForgotten) == [PeerForgotten(InstanceId("decode-0"))]


# --- proxies ---------------------------------------------------------------------------------------------------------

LOST, OTHER = ProxyId(1), ProxyId(2)


def test_a_request_of_a_model_that_was_dropped_breaks() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(DropModel(A.model))
    driven.on(Submit(make_job(1, A), 1))
    assert [message.request for message in driven.said(Broken)] == [1] and driven.core.queued == 0


def test_groups_of_two_proxies_may_have_the_same_number() -> None:
    driven = prefill(A, B, pages=8)
    driven.on(Submit(make_job(nth_request(LOST, 1), A), 1))
    driven.on(Submit(make_job(nth_request(OTHER, 1), B), 1))
    assert driven.core.queued == 2


def test_a_lost_proxy_s_requests_are_dropped_and_no_others() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    lost, kept = [nth_request(LOST, n) for n in (1, 2)], nth_request(OTHER, 1)
    for request in (*lost, kept):
        driven.on(Submit(make_job(request, A), 1))
    loaded(driven)
    driven.on(DropProxy(LOST))
    assert driven.said(ProxyDropped) == [ProxyDropped(LOST)]
    assert driven.core.queued == 1
    driven.stepped(5)
    assert not driven.said(Prefilled), "nobody wants what ran"
    assert ran(driven) == [lost[0], kept]


def test_what_was_handed_over_for_a_lost_proxy_stays_until_nobody_reads_it() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    for request in (nth_request(LOST, 1), nth_request(OTHER, 1)):
        driven.on(Submit(make_job(request, A), 1))
    loaded(driven)
    finish(driven)
    finish(driven)
    driven.on(DropProxy(LOST))
    assert driven.core.handed == 2
    driven.on(ReleaseProxy(LOST))
    assert driven.core.handed == 1
    driven.on(ReleaseKv(nth_request(OTHER, 1), 1))
    assert not driven.core.ledger.host.use()


def test_a_switch_says_how_long_it_waited_for_what() -> None:
    driven = prefill(WIDE, pages=8, slabs=None)
    driven.on(Submit(make_job(1, WIDE), 1))
    loaded(driven)
    driven.granted(refused=True)
    driven.granted(1)
    (switch,) = driven.said(SwitchDone)
    assert (switch.make_room_ns, switch.copy_ns, switch.kv_ns) == (0, 1_000_000, 2_000_000)


def test_a_model_that_was_evicted_meanwhile_is_switched_to_again() -> None:
    driven = prefill(A, WIDE, pages=4)
    for request, spec in enumerate((A, WIDE, A), start=1):
        driven.on(Submit(make_job(request, spec), request))
        loaded(driven)
        finish(driven)
    switches = [message.model for message in driven.said(SwitchDone, driven.effects)]
    assert switches == [A.model, WIDE.model, A.model] == driven.loads
    assert driven.core.counters.switches == 3


def test_counters() -> None:
    driven = prefill(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A, prompt=20), 1))
    loaded(driven)
    finish(driven)
    counters = driven.core.counters
    assert (counters.prefills, counters.prompt_tokens) == (1, 20)
    assert counters.swap_out_bytes == 2 * A.manifest.kv.block_bytes


def test_what_is_not_for_a_core_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="not for a prefill instance"):
        prefill(pages=8).on(Shutdown())
