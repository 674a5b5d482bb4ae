"""The router, scripted: a request's life."""

from __future__ import annotations

from sys import getrefcount

import pytest

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import (
    Adopt,
    Cancel,
    GaveUp,
    KvReleased,
    Phase,
    PromptLogprobs,
    ReleaseKv,
    Started,
    StepsTook,
    Submit,
    SwitchDone,
    Tokens,
)
from aegis.core.request import Failure, FinishReason, Token
from aegis.sim.faults.fake_models import make_spec
from decode.policies.least_slack import LeastSlack
from proxy.routing.events import ClientLeft, DeliverPrompt, Ended, InstanceDown, ModelAway, ModelRemoved, ModelUp
from tests.unit.proxy.routing.router_stand import D0, D1, OTHER, P0, P1, SPEC, Proxy, R, handle

# --- a life without trouble -------------------------------------------------------------------------------------------


def test_from_arrival_to_the_last_token() -> None:
    proxy = Proxy(P0, D0)
    proxy.arrive()
    ((to, submit),) = proxy.sent(Submit)
    assert to == P0 and submit.job.request == R and proxy.state() is State.QUEUED
    proxy.heard(P0, Started(R, 1))
    assert proxy.state() is State.PREFILLING
    proxy.prefilled()
    assert proxy.sent(Adopt) == [(D0, Adopt(submit.job, (10,), handle(P0)))] and proxy.state() is State.HANDED_OFF
    proxy.heard(D0, KvReleased(R, 1, handle(P0)))
    assert proxy.sent(ReleaseKv) == [(P0, ReleaseKv(R, 1))]
    proxy.decodes()
    assert proxy.state() is State.DECODING
    proxy.heard(D0, Phase((R,), running=False))
    assert proxy.state() is State.PREEMPTED
    proxy.decodes()
    proxy.heard(D0, Tokens(R, 1, 1, (Token(11), Token(12))))
    proxy.heard(D0, Tokens(R, 1, 3, (Token(13),), FinishReason.LENGTH))
    assert proxy.delivered[R] == [10, 11, 12, 13]
    assert proxy.ended[R] == Ended(R, State.FINISHED, FinishReason.LENGTH) and proxy.state() is None


def test_a_first_token_that_is_the_last_needs_no_decode_instance() -> None:
    proxy = Proxy(P0)
    proxy.reach("prefilling")
    proxy.heard(P0, Tokens(R, 1, 0, (Token(10),), FinishReason.STOP))
    assert proxy.delivered[R] == [10] and proxy.ended[R].reason is FinishReason.STOP and not proxy.all_sent()


def test_logprobs_of_the_prompt_are_delivered_once() -> None:
    proxy = Proxy(P0, P1, D0)
    proxy.reach("prefilling")
    prompt = (Token(1, -1.0),)
    proxy.heard(P0, PromptLogprobs(R, 1, prompt))
    assert proxy.last == [DeliverPrompt(R, prompt)]
    proxy.tell(InstanceDown(P0))
    proxy.heard(P1, Started(R, 2))
    proxy.heard(P1, PromptLogprobs(R, 2, prompt))
    assert proxy.last == []


def test_of_a_token_that_was_told_no_logprobs_are_kept() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("decoding")
    token = Token(12, -1.0, ((12, -1.0),))
    held = getrefcount(token)
    proxy.heard(D0, Tokens(R, 1, 2, (token,)))
    assert getrefcount(token) > held
    proxy.heard(D0, Tokens(R, 1, 3, (Token(13),)))
    assert getrefcount(token) == held


def test_groups_fill_up_and_load_is_spread() -> None:
    proxy = Proxy(P0, P1, D0)
    placed = []
    for request in range(1, 11):
        proxy.arrive(request)
        placed += [(to, message.group) for to, message in proxy.sent(Submit)]
    assert placed == [(P0, 1)] * 8 + [(P1, 1)] * 2
    proxy.arrive(11, model=OTHER.model)
    assert [(to, message.group) for to, message in proxy.sent(Submit)] == [(P1, 2)]


def test_prefilling_does_not_make_room_in_a_group() -> None:
    proxy = Proxy(P0, D0)
    for request in range(1, 9):
        proxy.arrive(request)
    proxy.heard(P0, Started(R, 1))
    proxy.prefilled()
    proxy.arrive(9)
    assert [message.group for _, message in proxy.sent(Submit)] == [2]


def test_the_running_model_makes_its_instance_cheaper() -> None:
    proxy = Proxy(P0, P1, D0)
    proxy.heard(P1, SwitchDone(OTHER.model, True, 0, 0, 0, 0))
    proxy.arrive(1)
    assert proxy.sent(Submit)[0][0] == P0
    proxy.arrive(2, model=OTHER.model)
    assert proxy.sent(Submit)[0][0] == P1


def test_a_decode_instance_with_room_in_a_batch_of_the_model_is_preferred() -> None:
    proxy = Proxy(P0, D0, D1)
    placed = []
    for request, model in [(1, SPEC.model), (2, OTHER.model), (3, OTHER.model), (4, SPEC.model)]:
        proxy.arrive(request, model=model)
        proxy.heard(P0, Started(RequestId(request), 1))
        proxy.prefilled(request=RequestId(request))
        placed += [to for to, _ in proxy.sent(Adopt)]
    assert placed == [D0, D1, D1, D0]


def test_a_finished_request_makes_room_again() -> None:
    proxy = Proxy(P0, D0, D1)
    proxy.arrive()
    proxy.heard(P0, Started(R, 1))
    proxy.prefilled()
    proxy.decodes()
    proxy.heard(D0, Tokens(R, 1, 1, (Token(7),), FinishReason.STOP))
    proxy.arrive(2, model=OTHER.model)
    proxy.heard(P0, Started(RequestId(2), 1))
    proxy.prefilled(request=RequestId(2))
    assert [to for to, _ in proxy.sent(Adopt)] == [D0]


# --- waiting for instances --------------------------------------------------------------------------------------------


def test_requests_wait_for_a_prefill_instance_in_order_of_arrival() -> None:
    proxy = Proxy()
    for request in (1, 2, 3):
        proxy.arrive(request)
        assert proxy.last == []
    proxy.up(P0)
    assert [message.job.request for _, message in proxy.sent(Submit)] == [1, 2, 3]


def test_kv_waits_for_a_decode_instance() -> None:
    proxy = Proxy(P0)
    proxy.reach("handed off")
    assert proxy.delivered[R] == [10] and not proxy.all_sent()
    proxy.up(D0)
    assert [message.tokens for _, message in proxy.sent(Adopt)] == [(10,)]
    proxy.up(D1)
    assert proxy.all_sent() == [], "it is adopted once"


def test_kv_that_waits_is_released_when_the_client_leaves() -> None:
    proxy = Proxy(P0)
    proxy.reach("handed off")
    proxy.tell(ClientLeft(R))
    assert proxy.all_sent() == [(P0, ReleaseKv(R, 1))] and proxy.ended[R].state is State.CANCELLED


# --- clients that leave, models that go -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "to"), [("queued", P0), ("prefilling", P0), ("handed off", D0), ("decoding", D0), ("preempted", D0)]
)
def test_who_works_for_a_client_that_left_is_told(point: str, to: InstanceId) -> None:
    proxy = Proxy(P0, D0)
    proxy.reach(point)
    proxy.tell(ClientLeft(R))
    assert proxy.all_sent() == [(to, Cancel(R, 1))]
    assert proxy.ended[R].state is State.CANCELLED and proxy.state() is None
    proxy.tell(ClientLeft(R))
    assert proxy.last == []


def test_a_client_leaves_after_the_adopter_died() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("handed off")
    proxy.tell(ClientLeft(R))
    proxy.tell(InstanceDown(D0))
    assert proxy.all_sent() == [(P0, ReleaseKv(R, 1))], "law 3: the session is gone, its handle is not"


def test_law_3_a_handle_is_released_once() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("handed off")
    proxy.heard(D0, KvReleased(R, 1, handle(P0)))
    assert proxy.sent(ReleaseKv) == [(P0, ReleaseKv(R, 1))]
    proxy.heard(D0, KvReleased(R, 1, handle(P0)))
    assert proxy.all_sent() == []
    proxy.tell(InstanceDown(D0))
    assert not proxy.sent(ReleaseKv)


def test_law_3_nothing_is_released_to_the_owners_successor() -> None:
    """A new process with the old name never had that handle."""
    proxy = Proxy(P0, D0)
    proxy.reach("handed off")
    proxy.tell(InstanceDown(P0))
    proxy.up(P0)
    proxy.heard(D0, KvReleased(R, 1, handle(P0)))
    assert not proxy.sent(ReleaseKv)


def test_requests_of_a_model_that_returns_may_be_sent_again() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("decoding")
    proxy.tell(ModelRemoved(SPEC.model, "cannot be served now: the hub is away", returns=True))
    assert proxy.ended[R].failure is Failure.MODEL_NOT_FETCHED
    assert proxy.ended[R].message == "model 'm0' cannot be served now: the hub is away"


def test_requests_of_a_removed_model_fail_and_others_go_on() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("decoding")
    proxy.arrive(2)
    proxy.arrive(3, model=OTHER.model)
    proxy.tell(ModelRemoved(SPEC.model))
    assert {r: e.state for r, e in proxy.ended.items()} == {R: State.FAILED, RequestId(2): State.FAILED}
    assert "m0" in proxy.ended[R].message and "removed" in proxy.ended[R].message
    assert proxy.ended[R].failure is Failure.MODEL_REMOVED
    assert sorted(proxy.all_sent(), key=lambda x: x[0]) == [(D0, Cancel(R, 1)), (P0, Cancel(RequestId(2), 1))]
    proxy.arrive(4, model=OTHER.model)
    assert proxy.sent(Submit) and proxy.state(3) is State.QUEUED
    proxy.tell(ModelUp(SPEC, 1000))
    proxy.arrive(5)
    assert proxy.sent(Submit)


def test_an_instance_that_has_changed_to_a_removed_model_runs_none_that_is_known() -> None:
    """It says so late: a model of that name that comes later is another one."""
    proxy = Proxy(P0, D0)
    for instance in (P0, D0):
        proxy.heard(instance, SwitchDone(OTHER.model, True, 0, 0, 0, 0))
    proxy.tell(ModelRemoved(SPEC.model))
    for instance, lists in ((P0, proxy.core._prefills), (D0, proxy.core._decodes)):
        proxy.heard(instance, SwitchDone(SPEC.model, True, 0, 0, 0, 0))
        assert not lists.active_on(SPEC.model) and not lists.active_on(OTHER.model)


def test_requests_of_a_model_that_is_away_wait_until_it_is_back() -> None:
    """What is with an instance goes on there, unless that gives it up."""
    proxy = Proxy(P0, D0)
    proxy.reach("handed off")
    proxy.tell(ModelAway(SPEC.model))
    proxy.arrive(2)
    proxy.heard(D0, GaveUp(R, 1))
    proxy.arrive(3, model=OTHER.model)
    assert [submit.job.request for _, submit in proxy.sent(Submit)] == [RequestId(3)]
    assert not proxy.ended
    proxy.tell(ModelUp(SPEC, 1000))
    assert [submit.job.request for _, submit in proxy.sent(Submit)] == [R, RequestId(2)]


def test_requests_of_a_model_that_is_away_fail_when_it_does_not_come_back() -> None:
    proxy = Proxy(P0, D0)
    proxy.tell(ModelAway(SPEC.model))
    proxy.arrive(2)
    proxy.tell(ModelRemoved(SPEC.model, "cannot be served: why"))
    assert proxy.ended[RequestId(2)].state is State.FAILED
    proxy.tell(ModelUp(SPEC, 1000))
    proxy.arrive(3)
    assert proxy.sent(Submit)


def test_a_request_known_to_nobody_is_ignored() -> None:
    proxy = Proxy(P0, D0)
    proxy.heard(D0, Phase((RequestId(77),), running=True))
    proxy.heard(D0, Tokens(RequestId(77), 1, 0, (Token(1),)))
    assert proxy.last == []


def test_switches_teach_the_estimates() -> None:
    """Prefetched ones do not: their time is that of waiting, not of copying."""
    proxy = Proxy(P0, D0)
    before = proxy.core._latency[SPEC.model].switch_ns()
    proxy.heard(D0, SwitchDone(SPEC.model, True, 0, 10 * before, 0, 0))
    assert proxy.core._latency[SPEC.model].switch_ns() == before
    proxy.heard(D0, SwitchDone(SPEC.model, False, 0, 10 * before, 0, 0))
    assert proxy.core._latency[SPEC.model].switch_ns() == pytest.approx(10 * before, rel=0.1)


def test_steps_teach_where_there_is_time_to_spare() -> None:
    """A third model goes to the instance whose requests want less, and what they want is known once steps were seen."""
    third, here, there = make_spec(2, image_pages=3, block_bytes=1024), InstanceId("mixed-0"), InstanceId("mixed-1")
    for slow, fast, spare in ((SPEC, OTHER, there), (OTHER, SPEC, here)):
        proxy = Proxy(here, there, policy=LeastSlack())
        proxy.tell(ModelUp(third, 1000))
        proxy.arrive(1)
        proxy.arrive(2, model=OTHER.model)
        assert [instance for instance, _ in proxy.sent(Submit)] == [there]
        proxy.heard(here, StepsTook(slow.model, 100, 1, 90_000_000))
        proxy.heard(there, StepsTook(fast.model, 100, 1, 10_000_000))
        proxy.heard(there, StepsTook(ModelId("unknown"), 100, 1, 10_000_000))
        proxy.arrive(3, model=third.model)
        assert [instance for instance, _ in proxy.sent(Submit)] == [spare]
