"""The router over mixed instances: a request stays where it was placed, and what has no place is refused."""

from __future__ import annotations

import pytest

from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import Broken, Cancel, GaveUp, Phase, Prefilled, ReleaseKv, Started, Submit, Tokens
from aegis.core.request import PLACES_NEED, Failure, FinishReason, Job, Sampling, Token
from decode.policies.dedicated import Dedicated
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.routing.events import ClientLeft, InstanceDown, ModelRemoved, ModelUp, RequestArrived
from proxy.routing.router import Router
from tests.unit.proxy.routing.router_stand import D0, OTHER, P0, SPEC, Proxy, R

M0, M1 = InstanceId("mixed-0"), InstanceId("mixed-1")
LATE_NS = 15


def reach(proxy: Proxy, point: str, *, attempt: int = 1, first: int = 0) -> None:
    """Request 1 from its placement to `point`; `first` tokens were made before."""
    points = ["queued", "prefilling", "handed off", "decoding", "preempted"]
    heard = (
        Started(R, attempt),
        Prefilled(R, attempt, Token(10), None, 5),
        Phase((R,), running=True),
        Phase((R,), running=False),
    )
    for message in heard[: points.index(point)]:
        proxy.heard(M0, message)
        if isinstance(message, Phase) and message.running:
            proxy.heard(M0, Tokens(R, attempt, first + 1, (Token(11),)))


def test_from_arrival_to_the_last_token() -> None:
    proxy = Proxy(M0)
    proxy.arrive()
    ((to, submit),) = proxy.sent(Submit)
    assert to == M0 and submit.job.request == R
    for point, state in (
        ("queued", State.QUEUED),
        ("prefilling", State.PREFILLING),
        ("handed off", State.HANDED_OFF),
        ("decoding", State.DECODING),
        ("preempted", State.PREEMPTED),
    ):
        proxy = Proxy(M0)
        proxy.arrive()
        reach(proxy, point)
        assert proxy.state() is state
    proxy.heard(M0, Tokens(R, 1, 2, (Token(12),), FinishReason.LENGTH))
    assert proxy.delivered[R] == [10, 11, 12] and proxy.ended[R].state is State.FINISHED
    assert not proxy.all_sent() and not proxy.core._handles


@pytest.mark.parametrize("point", ["queued", "prefilling", "handed off", "decoding", "preempted"])
def test_whoever_leaves_is_cancelled_there(point: str) -> None:
    proxy = Proxy(M0)
    proxy.arrive()
    reach(proxy, point)
    proxy.tell(ClientLeft(R))
    assert proxy.all_sent() == [(M0, Cancel(R, 1))] and proxy.ended[R].state is State.CANCELLED
    proxy.heard(M0, Prefilled(R, 1, Token(10), None, 5))
    proxy.heard(M0, Tokens(R, 1, 2, (Token(12),)))
    assert not proxy.all_sent()


@pytest.mark.parametrize("point", ["queued", "prefilling", "handed off", "decoding", "preempted"])
def test_a_death_replays_it_elsewhere_with_what_was_sent(point: str) -> None:
    proxy = Proxy(M0, M1)
    proxy.arrive()
    reach(proxy, point)
    proxy.tell(InstanceDown(M0))
    ((to, submit),) = proxy.sent(Submit)
    assert to == M1 and submit.job.attempt == 2 and list(submit.job.sent) == proxy.delivered.get(R, [])
    assert proxy.state() is State.QUEUED


def test_who_gives_it_up_gets_it_back() -> None:
    proxy = Proxy(M0)
    proxy.arrive()
    reach(proxy, "preempted")
    proxy.heard(M0, GaveUp(R, 1))
    ((to, submit),) = proxy.sent(Submit)
    assert (to, submit.job.attempt, submit.job.sent) == (M0, 2, (10, 11))
    reach(proxy, "decoding", attempt=2, first=2)
    assert proxy.delivered[R] == [10, 11, 10, 11]


def test_a_broken_one_fails() -> None:
    proxy = Proxy(M0)
    proxy.arrive()
    reach(proxy, "prefilling")
    proxy.heard(M0, Broken(R, 1, "why"))
    assert (proxy.ended[R].state, proxy.ended[R].message) == (State.FAILED, "why")


def test_what_arrives_early_is_placed_when_an_instance_comes_up() -> None:
    proxy = Proxy()
    proxy.arrive()
    assert not proxy.all_sent()
    proxy.up(M0)
    assert [to for to, _ in proxy.sent(Submit)] == [M0]


def test_a_turn_that_was_told_before_the_replay_is_not_the_new_attempts() -> None:
    """The prefill instance dies, and the mixed instance that had adopted the request gets it anew."""
    proxy = Proxy(P0, M0)
    proxy.arrive()
    proxy.heard(P0, Started(R, 1))
    proxy.prefilled()
    proxy.tell(InstanceDown(P0))
    assert [to for to, _ in proxy.sent(Submit)] == [M0]
    proxy.heard(M0, Phase((R,), running=True))
    assert proxy.state() is State.QUEUED


def test_requests_spread_over_mixed_instances() -> None:
    proxy = Proxy(M0, M1)
    proxy.arrive(1)
    proxy.arrive(2, model=OTHER.model)
    assert [to for to, _ in proxy.sent(Submit)] == [M1]


class Strict(Proxy):
    """Every model needs an instance of its own; late requests are given up."""

    def __init__(self, *instances: InstanceId) -> None:
        super().__init__()
        self.core = Router(GroupedFcfs(), Dedicated(), Hardware(), give_up_ns=LATE_NS)
        for spec in (SPEC, OTHER):
            self.tell(ModelUp(spec, 1000))
        for instance in instances:
            self.up(instance)

    def arrive_at(self, now_ns: int, request: int) -> None:
        job = Job(RequestId(request), 1, SPEC.model, (1,), Sampling(max_tokens=50), now_ns)
        self.last = self.core.on(RequestArrived(job), now_ns)

    def is_handed_over(self, request: int) -> None:
        self.heard(P0, Started(RequestId(request), 1))
        self.prefilled(request=RequestId(request))


def test_a_model_without_a_place_is_refused() -> None:
    proxy = Strict(M0)
    proxy.arrive(1)
    proxy.arrive(2, model=OTHER.model)
    ended = proxy.ended[RequestId(2)]
    assert (ended.state, ended.failure) == (State.FAILED, Failure.NO_PLACE)
    assert ended.message == f"no instance has a place for model '{OTHER.model}'; {PLACES_NEED}"
    proxy.tell(ModelRemoved(SPEC.model))
    proxy.arrive(3, model=OTHER.model)
    assert [to for to, _ in proxy.sent(Submit)] == [M0]


def test_a_handed_over_request_without_a_place_is_refused_and_its_kv_released() -> None:
    proxy = Strict(P0, D0)
    proxy.arrive(1)
    proxy.is_handed_over(1)
    proxy.arrive(2, model=OTHER.model)
    proxy.is_handed_over(2)
    assert proxy.all_sent() == [(P0, ReleaseKv(RequestId(2), 1))]
    assert proxy.ended[RequestId(2)].state is State.FAILED


def test_a_model_whose_instance_died_waits_for_it() -> None:
    proxy = Strict(M0, M1)
    proxy.arrive(1)
    proxy.arrive(2, model=OTHER.model)
    proxy.all_sent()
    proxy.tell(InstanceDown(M1))
    proxy.arrive(3, model=OTHER.model)
    assert not proxy.ended and not proxy.sent(Submit)
    proxy.up(M1)
    assert [(to, s.job.request, s.job.attempt) for to, s in proxy.sent(Submit)] == [(M1, 2, 2), (M1, 3, 1)]


def test_a_model_whose_instance_is_given_up_is_refused() -> None:
    proxy = Strict(M0, M1)
    proxy.arrive(1)
    proxy.arrive(2, model=OTHER.model)
    proxy.tell(InstanceDown(M1))
    proxy.tell(InstanceDown(M1, for_good=True))
    assert proxy.ended[RequestId(2)].state is State.FAILED and RequestId(1) not in proxy.ended


def test_who_has_no_token_for_too_long_fails_when_the_next_one_arrives() -> None:
    proxy = Strict(M0)
    proxy.arrive_at(0, 1)
    proxy.arrive_at(LATE_NS, 2)
    assert not proxy.sent(Cancel)
    proxy.heard(M0, Started(RequestId(2), 1))
    proxy.heard(M0, Prefilled(RequestId(2), 1, Token(10), None, 5))
    proxy.arrive_at(LATE_NS + 1, 3)
    assert proxy.sent(Cancel) == [(M0, Cancel(RequestId(1), 1))]
    proxy.arrive_at(100, 4)
    assert proxy.sent(Cancel) == [(M0, Cancel(RequestId(3), 1))], "the second one has a token"
