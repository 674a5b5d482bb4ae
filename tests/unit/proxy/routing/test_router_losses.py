"""The router, scripted: what happens when something dies at each point of a request's life, or gives it up."""

from __future__ import annotations

import pytest

from aegis.core.lifecycle import State
from aegis.core.messages import (
    Adopt,
    Broken,
    Cancel,
    FromInstance,
    GaveUp,
    KvReleased,
    PromptLogprobs,
    ReleaseKv,
    Started,
    Submit,
    Tokens,
)
from aegis.core.request import Failure, FinishReason, Token
from aegis.sim.faults.fake_models import make_spec
from proxy.routing.events import ClientLeft, Ended, InstanceDown, ModelUp, Replayed
from proxy.routing.router import MAX_LOSSES, MAX_REPLAYS
from tests.unit.proxy.routing.router_stand import D0, D1, P0, P1, Proxy, R, handle

# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["queued", "prefilling", "handed off", "decoding, KV not there"])
def test_a_prefill_instance_dies_while_it_matters(point: str) -> None:
    proxy = Proxy(P0, P1, D0)
    proxy.reach(point)
    sent = tuple(proxy.delivered.get(R, ()))
    proxy.tell(InstanceDown(P0))
    assert Replayed(R) in proxy.last and proxy.state() is State.QUEUED
    ((to, submit),) = proxy.sent(Submit)
    assert to == P1 and (submit.job.attempt, submit.job.sent) == (2, sent)
    assert proxy.sent(Cancel) == ([(D0, Cancel(R, 1))] if "d" in point and sent else [])
    assert not proxy.sent(ReleaseKv), "its owner is dead"
    proxy.heard(P1, Started(R, 2))
    proxy.prefilled(owner=P1, attempt=2, token=20)
    assert proxy.delivered[R] == [*sent, 20]


@pytest.mark.parametrize("point", ["decoding", "preempted"])
def test_a_prefill_instance_dies_when_the_kv_has_left_it(point: str) -> None:
    proxy = Proxy(P0, D0)
    proxy.reach(point)
    proxy.tell(InstanceDown(P0))
    assert proxy.last == []


@pytest.mark.parametrize("point", ["handed off", "decoding, KV not there", "decoding", "preempted"])
def test_a_decode_instance_dies(point: str) -> None:
    """Law 3: KV it had not fetched yet is released by the core, and only that."""
    proxy = Proxy(P0, D0, D1)
    proxy.reach(point)
    sent = tuple(proxy.delivered[R])
    proxy.tell(InstanceDown(D0))
    released = [] if point in ("decoding", "preempted") else [(P0, ReleaseKv(R, 1))]
    assert proxy.sent(ReleaseKv) == released and not proxy.sent(Cancel)
    ((to, submit),) = proxy.sent(Submit)
    assert to == P0 and (submit.job.attempt, submit.job.sent) == (2, sent)
    proxy.heard(P0, Started(R, 2))
    proxy.prefilled(attempt=2, token=20)
    assert proxy.sent(Adopt)[0][0] == D1 and proxy.sent(Adopt)[0][1].tokens == (*sent, 20)
    proxy.heard(D1, KvReleased(R, 2, handle(P0)))
    assert proxy.sent(ReleaseKv) == [(P0, ReleaseKv(R, 2))]


def test_instances_that_were_asked_to_end_do_not_count_against_their_requests() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("prefilling")
    for attempt in range(2, 3 * MAX_REPLAYS):
        proxy.tell(InstanceDown(P0, requested=True))
        proxy.up(P0)
        assert [submit.job.attempt for _, submit in proxy.sent(Submit)] == [attempt]
        proxy.heard(P0, Started(R, attempt))
    assert proxy.state() is State.PREFILLING


def test_the_only_prefill_instance_dies_and_comes_back() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("prefilling")
    proxy.tell(InstanceDown(P0))
    assert not proxy.all_sent() and proxy.state() is State.QUEUED
    proxy.up(P0)
    assert [(to, message.job.attempt) for to, message in proxy.sent(Submit)] == [(P0, 2)]


def test_others_are_not_disturbed_by_a_death() -> None:
    proxy = Proxy(P0, P1, D0, D1)
    proxy.reach("decoding")
    for request in range(2, 10):
        proxy.arrive(request)
    proxy.tell(InstanceDown(D1))
    assert proxy.last == []


@pytest.mark.parametrize(
    "message",
    [
        Tokens(R, 1, 2, (Token(99),)),
        Tokens(R, 1, 2, (Token(99),), FinishReason.STOP),
        Started(R, 1),
        GaveUp(R, 1),
        Broken(R, 1, "why"),
        PromptLogprobs(R, 1, (Token(1),)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_what_an_older_attempt_says_is_not_heard(message: FromInstance) -> None:
    """Law 1: its tokens may differ, and they are late."""
    proxy = Proxy(P0, P1, D0)
    proxy.reach("decoding, KV not there")
    proxy.tell(InstanceDown(P0))
    proxy.heard(D0, message)
    assert proxy.last == [] and proxy.delivered[R] == [10, 11]


def test_kv_of_an_older_attempt_is_released_at_once() -> None:
    """The first attempt's prefill had ended when its decode instance's death was heard of — or was cancelled late."""
    proxy = Proxy(P0, D0)
    proxy.reach("prefilling")
    proxy.tell(ClientLeft(R))
    assert proxy.sent(Cancel) == [(P0, Cancel(R, 1))]
    proxy.prefilled()
    assert proxy.all_sent() == [(P0, ReleaseKv(R, 1))] and R not in proxy.delivered


def test_three_losses_fail_a_request() -> None:
    proxy = Proxy(P0, D0)
    proxy.arrive()
    for loss in range(1, MAX_LOSSES + 1):
        assert R not in proxy.ended
        proxy.heard(P0, Started(R, loss))
        proxy.tell(InstanceDown(P0))
        proxy.up(P0)
    assert proxy.ended[R].state is State.FAILED and "lost 3 times" in proxy.ended[R].message


def test_who_only_waited_is_not_blamed_as_soon() -> None:
    """What was running may be what kills instances; its neighbours in the queue are not failed with it."""
    proxy = Proxy(P0, D0)
    proxy.arrive()
    for death in range(1, MAX_REPLAYS):
        proxy.tell(InstanceDown(P0))
        proxy.up(P0)
        assert [submit.job.attempt for _, submit in proxy.sent(Submit)] == [death + 1]
    proxy.tell(InstanceDown(P0))
    assert proxy.ended[R].state is State.FAILED


def test_requests_wait_for_a_model_that_is_not_up_yet() -> None:
    proxy = Proxy(P0, D0)
    late = make_spec(2, image_pages=3, block_bytes=1024)
    proxy.arrive(model=late.model)
    assert not proxy.all_sent() and proxy.state() is State.QUEUED
    proxy.tell(ModelUp(late, 1000))
    assert [submit.job.model for _, submit in proxy.sent(Submit)] == [late.model]


# --- giving up, breaking ----------------------------------------------------------------------------------------------


def test_a_request_whose_kv_was_given_up_is_prefilled_again() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("preempted")
    proxy.heard(D0, GaveUp(R, 1))
    ((_, submit),) = proxy.sent(Submit)
    assert (submit.job.attempt, submit.job.sent) == (2, (10, 11)) and Replayed(R) in proxy.last
    assert not proxy.sent(Cancel), "it is gone there"


def test_giving_up_is_no_loss() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("decoding")
    for attempt in range(1, 3 * MAX_LOSSES):
        proxy.heard(D0, GaveUp(R, attempt))
        proxy.heard(P0, Started(R, attempt + 1))
        proxy.prefilled(attempt=attempt + 1)
        proxy.heard(D0, KvReleased(R, attempt + 1, handle(P0)))
    assert R not in proxy.ended


def test_what_cannot_run_fails_with_its_reason() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("prefilling")
    proxy.heard(P0, Broken(R, 1, "why", Failure.SLOW_GRAMMARS))
    assert proxy.ended[R] == Ended(R, State.FAILED, message="why", failure=Failure.SLOW_GRAMMARS)
    assert proxy.sent(Cancel) == [(P0, Cancel(R, 1))]
