"""Who is refused after it was taken, because its first token has not come and there is not the time for all."""

from __future__ import annotations

import pytest

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import Cancel, Prefilled, Started, StepsTook
from aegis.core.model import Slo
from aegis.core.request import Failure, Job, Sampling, Token
from aegis.core.role import Role
from aegis.sim.faults.fake_models import make_spec
from decode.policies.least_slack import LeastSlack
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.routing.events import (
    ClientLeft,
    Effect,
    Ended,
    Event,
    InstanceUp,
    MessageReceived,
    ModelUp,
    RequestArrived,
    To,
)
from proxy.routing.patience import PATIENCE
from proxy.routing.router import Router

TTFT_NS = 2 * NS_PER_S
SPEC = make_spec(0, image_pages=3, block_bytes=1024, slo=Slo(ttft_ns=TTFT_NS, tbt_ns=100 * NS_PER_MS))
MIXED, PREFILL = InstanceId("mixed-0"), InstanceId("prefill-0")
LATER_NS = PATIENCE * TTFT_NS + 1


class Pool:
    def __init__(self, *instances: InstanceId, step_ms: int) -> None:
        """A step of each request takes that long, of the 100 ms within which each wants one."""
        self.core = Router(GroupedFcfs(), LeastSlack(), Hardware())
        self._asked = 100
        self.tell(ModelUp(SPEC, 100_000))
        for name in instances:
            self.tell(InstanceUp(name, Role(name.partition("-")[0])))
        self.takes(step_ms)

    def takes(self, step_ms: int, now_ns: int = 0) -> None:
        for _ in range(500):
            self.tell(MessageReceived(MIXED, StepsTook(SPEC.model, 100, 1, step_ms * NS_PER_MS)), now_ns)

    def tell(self, event: Event, now_ns: int = 0) -> list[Effect]:
        return self.core.on(event, now_ns)

    def arrive(
        self, request: int, now_ns: int = 0, *, refusable: bool = True, sent: tuple[int, ...] = (), tokens: int = 50
    ) -> list[Effect]:
        job = Job(RequestId(request), 1, SPEC.model, (1,) * tokens, Sampling(max_tokens=99), now_ns, sent)
        return self.tell(RequestArrived(job, None, refusable), now_ns)

    def refused(self, now_ns: int) -> list[int]:
        """When another one arrives then."""
        self._asked += 1
        return [effect.request for effect in self.arrive(self._asked, now_ns) if isinstance(effect, Ended)]


def test_who_has_waited_long_where_there_is_not_the_time_for_all_is_refused() -> None:
    pool = Pool(MIXED, step_ms=150)
    pool.arrive(1)
    assert pool.refused(LATER_NS - 1) == [], "it has not waited so long"
    cancel, ended = pool.arrive(2, LATER_NS)[:2]
    assert cancel == To(MIXED, Cancel(RequestId(1), 1))
    assert isinstance(ended, Ended)
    assert (ended.request, ended.state, ended.failure) == (1, State.FAILED, Failure.WOULD_BE_LATE)
    assert ended.retry_s >= 1
    assert ended.message == f"there is no time for requests of model '{SPEC.model}' now; try again in {ended.retry_s} s"


def test_it_needs_no_other_request_for_that() -> None:
    pool = Pool(MIXED, step_ms=150)
    pool.arrive(1)
    tick = MessageReceived(MIXED, StepsTook(SPEC.model, 100, 1, 150 * NS_PER_MS))
    assert pool.tell(tick, LATER_NS - 1) == []
    _, ended = pool.tell(tick, LATER_NS)
    assert isinstance(ended, Ended) and ended.failure is Failure.WOULD_BE_LATE


def test_where_there_is_the_time_for_all_who_waits_is_let_wait() -> None:
    pool = Pool(MIXED, step_ms=10)
    pool.arrive(1)
    assert pool.refused(LATER_NS) == []
    pool.takes(150, LATER_NS)
    assert pool.refused(LATER_NS + TTFT_NS) == [], "and it is looked at after another TTFT"
    assert pool.refused(LATER_NS + TTFT_NS + 1) == [1]


@pytest.mark.parametrize("how", ["a token", "not refusable", "sent"])
def test_who_has_begun_or_may_not_be_refused_is_let_wait(how: str) -> None:
    pool = Pool(MIXED, step_ms=150)
    pool.arrive(1, refusable=how != "not refusable", sent=(7,) if how == "sent" else ())
    if how == "a token":
        for message in (Started(RequestId(1), 1), Prefilled(RequestId(1), 1, Token(5), None, 1)):
            pool.tell(MessageReceived(MIXED, message))
    assert pool.refused(LATER_NS) == []


@pytest.mark.parametrize("tokens", [50, 200_000])
def test_a_prefill_instance_has_not_the_time_if_its_queue_is_longer_than_the_ttft(tokens: int) -> None:
    pool = Pool(PREFILL, MIXED, step_ms=1)
    pool.arrive(1, tokens=tokens)
    longer = pool.core.loads()[0].prefill_ns > TTFT_NS
    assert longer == (tokens > 50)
    assert pool.refused(LATER_NS) == ([1] if longer else [])


def test_nothing_is_kept_for_long_of_requests_that_have_ended() -> None:
    """A TTFT may be hours, and thousands of requests end within it."""
    pool = Pool(MIXED, step_ms=150)
    pool.arrive(1)
    for request in range(2, 5_000):
        pool.arrive(request)
        pool.tell(ClientLeft(RequestId(request)))
    assert len(pool.core._patience._waiting) < 2_000
    assert pool.refused(LATER_NS) == [1], "the one that still waits is not forgotten"
