"""The router, scripted: beside others."""

from __future__ import annotations

import pytest

from aegis.core.ids import ModelId, RequestId
from aegis.core.messages import Adopt, Reused, Started, Submit
from aegis.core.request import Job, Sampling
from proxy.routing.events import (
    ClientLeft,
    DeliverReused,
    ForeignLoad,
    InstanceDown,
    ModelLoad,
    ModelRemoved,
    ModelUp,
    RequestArrived,
)
from tests.unit.proxy.routing.router_stand import D0, D1, OTHER, P0, P1, SPEC, Proxy, R

# --- other proxies ----------------------------------------------------------------------------------------------------


def test_requests_keep_out_of_other_proxies_way() -> None:
    proxy = Proxy(P0, P1, D0, D1)
    proxy.tell(ForeignLoad(P0, 10**12, ()))
    proxy.tell(ForeignLoad(D0, 0, (ModelLoad(OTHER.model, 3, 5000), ModelLoad(ModelId("unknown"), 1, 1))))
    proxy.arrive()
    assert [instance for instance, _ in proxy.sent(Submit)] == [P1]
    proxy.heard(P1, Started(R, 1))
    proxy.prefilled(owner=P1)
    assert [instance for instance, _ in proxy.sent(Adopt)] == [D1]


def test_others_are_told_of_own_requests_alone() -> None:
    proxy = Proxy(P0, D0)
    proxy.tell(ForeignLoad(P0, 10**12, ()))
    proxy.tell(ForeignLoad(D0, 0, (ModelLoad(SPEC.model, 3, 5000),)))
    assert proxy.core.loads() == [ForeignLoad(P0, 0, ()), ForeignLoad(D0, 0, ())]
    proxy.arrive()
    prefills, _ = proxy.core.loads()
    assert 0 < prefills.prefill_ns < 10**12
    proxy.heard(P0, Started(R, 1))
    proxy.prefilled()
    assert proxy.core.loads() == [ForeignLoad(P0, 0, ()), ForeignLoad(D0, 0, (ModelLoad(SPEC.model, 1, 5),))]


def test_a_model_that_goes_takes_others_requests_with_it() -> None:
    proxy = Proxy(D0)
    proxy.tell(ForeignLoad(D0, 0, (ModelLoad(SPEC.model, 3, 5000),)))
    proxy.tell(ModelRemoved(SPEC.model))
    proxy.tell(ForeignLoad(D0, 0, (ModelLoad(SPEC.model, 3, 5000),)))
    proxy.tell(ModelUp(SPEC, 1000))
    proxy.tell(InstanceDown(D0))
    assert proxy.last == []


# --- what another proxy began -----------------------------------------------------------------------------------------


def test_a_request_that_was_begun_elsewhere_goes_on_after_its_tokens() -> None:
    proxy = Proxy(P0, D0)
    job = Job(R, 1, SPEC.model, (0, 1), Sampling(max_tokens=50), 0, sent=(8, 9))
    proxy.delivered[R] = [8, 9]
    proxy.tell(RequestArrived(job))
    ((_, submit),) = proxy.sent(Submit)
    assert submit.job.sent == (8, 9)
    proxy.heard(P0, Started(R, 1))
    proxy.prefilled()
    ((_, adopt),) = proxy.sent(Adopt)
    assert adopt.tokens == (8, 9, 10)
    proxy.tell(InstanceDown(D0))
    proxy.up(D0)
    assert proxy.delivered[R] == [8, 9, 10]


def test_choices_of_one_call_are_placed_together() -> None:
    proxy = Proxy(P0, P1, D0)
    for request in (1, 2, 3):
        job = Job(RequestId(request), 1, SPEC.model, (1, 2), Sampling(max_tokens=50), 0)
        proxy.tell(RequestArrived(job, RequestId(1) if request > 1 else None))
        ((to, submit),) = proxy.sent(Submit)
        assert (to, submit.group) == (P0, 1)
    proxy.tell(ClientLeft(R))
    proxy.tell(RequestArrived(Job(RequestId(4), 1, SPEC.model, (1, 2), Sampling(max_tokens=50), 0), R))
    assert proxy.sent(Submit), "the first one may have ended"


def test_a_client_is_told_once_what_was_reused() -> None:
    proxy = Proxy(P0, D0)
    proxy.reach("prefilling")
    proxy.heard(P0, Reused(R, 1, 32))
    assert proxy.last == [DeliverReused(R, 32)]
    proxy.heard(P0, Reused(R, 2, 16))
    assert proxy.last == [], "of an attempt that is not the present one"
    proxy.tell(InstanceDown(P0))
    proxy.up(P0)
    proxy.heard(P0, Started(R, 2))
    proxy.heard(P0, Reused(R, 2, 32))
    assert proxy.last == []


def test_loads_are_shares_of_the_time_there_is_whoever_asked() -> None:
    proxy = Proxy(P0, D0)
    assert proxy.core.load_ppm() == {P0: 0, D0: 0}
    proxy.arrive(1)
    alone_ppm = proxy.core.load_ppm()[P0]
    assert alone_ppm > 0
    proxy.tell(ForeignLoad(P0, SPEC.slo.ttft_ns // 2, ()))
    proxy.tell(ForeignLoad(D0, 0, (ModelLoad(SPEC.model, 3, 60),)))
    loads = proxy.core.load_ppm()
    assert loads[P0] == pytest.approx(alone_ppm + 500_000, abs=2)
    assert loads[D0] > 0
