"""The estimated first token of a request that came now, by the router."""

from __future__ import annotations

import pytest

from aegis.core.clock import NS_PER_S
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import Prefilled, Started
from aegis.core.model import Slo
from aegis.core.request import Job, Sampling, Token
from aegis.core.role import Role
from aegis.core.views import Work
from aegis.sim.faults.fake_models import make_spec
from decode.policies.least_slack import LeastSlack
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.routing.events import ForeignLoad, InstanceUp, MessageReceived, ModelLoad, ModelUp, RequestArrived, SloSet
from proxy.routing.router import Router

SPEC = make_spec(0, image_pages=3, block_bytes=1024)
PROMPT = (1,) * 50


def pool(role: Role) -> Router:
    core = Router(GroupedFcfs(), LeastSlack(), Hardware())
    core.on(ModelUp(SPEC, 10_000), 0)
    core.on(InstanceUp(InstanceId(f"{role}-0"), role), 0)
    return core


def arrive(core: Router, *numbers: int) -> None:
    for number in numbers:
        core.on(RequestArrived(Job(RequestId(number), 1, SPEC.model, PROMPT, Sampling(max_tokens=9), number)), number)


def expected_ns(core: Router) -> int:
    estimate = core.admission.expected_ns(Work(SPEC.model, len(PROMPT)), now_ns=0)
    assert estimate is not None
    return estimate


@pytest.mark.parametrize("role", [Role.MIXED, Role.PREFILL])
def test_whoever_waits_makes_it_later(role: Role) -> None:
    core = pool(role)
    estimates = [expected_ns(core)]
    for number in range(1, 4):
        arrive(core, number)
        estimates.append(expected_ns(core))
    assert estimates == sorted(set(estimates))
    assert [core.waiting_before(RequestId(n)) for n in (1, 2, 3)] == [0, 1, 2]


def test_who_has_its_first_token_is_not_waited_for() -> None:
    core = pool(Role.MIXED)
    arrive(core, 1, 2)
    waiting_ns = expected_ns(core)
    core.on(MessageReceived(InstanceId("mixed-0"), Started(RequestId(1), 1)), 4)
    core.on(MessageReceived(InstanceId("mixed-0"), Prefilled(RequestId(1), 1, Token(5), None, 1)), 5)
    assert expected_ns(core) < waiting_ns
    assert [core.waiting_before(RequestId(n)) for n in (1, 2)] == [None, 0]


def test_what_other_proxies_have_waiting_counts() -> None:
    core = pool(Role.MIXED)
    before_ns = expected_ns(core)
    theirs = ModelLoad(SPEC.model, 1, 50, prefill_ns=NS_PER_S)
    core.on(ForeignLoad(InstanceId("mixed-0"), NS_PER_S, (theirs,)), 0)
    assert expected_ns(core) == before_ns + NS_PER_S
    arrive(core, 1)
    (load,) = core.loads()
    assert load.prefill_ns > 0, "and so does what this one has, for them"


def test_nobody_can_tell_of_a_model_or_a_pool_that_is_not_there() -> None:
    assert pool(Role.MIXED).admission.expected_ns(Work(ModelId("other"), 5), now_ns=0) is None
    core = Router(GroupedFcfs(), LeastSlack(), Hardware())
    core.on(ModelUp(SPEC, 10_000), 0)
    assert core.admission.expected_ns(Work(SPEC.model, 5), now_ns=0) is None


def test_deadlines_may_become_others() -> None:
    core = pool(Role.PREFILL)
    core.on(SloSet(SPEC.model, Slo(ttft_ns=7, tbt_ns=8)), 0)
    assert core._prefills.ttft_ns(SPEC.model) == 7
    core.on(SloSet(ModelId("other"), Slo()), 0)
