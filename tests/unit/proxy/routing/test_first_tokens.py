"""Requests that wait for a first token: counted, and estimated as the schedulers estimate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import Work
from aegis.sim.faults.fake_models import make_spec
from proxy.routing.first_tokens import FirstTokens

HERE, THERE = InstanceId("mixed-0"), InstanceId("mixed-1")
SPECS = [make_spec(n, image_pages=3, block_bytes=1024) for n in range(2)]
LATENCY = {spec.model: Latency(spec.manifest, Hardware()) for spec in SPECS}
A, B = (spec.model for spec in SPECS)


def waiting(*requests: tuple[int, InstanceId, ModelId, int]) -> FirstTokens:
    tokens = FirstTokens(LATENCY)
    for request, instance, model, length in requests:
        tokens.add(instance, RequestId(request), Work(model, length))
    return tokens


def test_a_place_is_told_among_those_that_came_earlier_there() -> None:
    tokens = waiting((3, HERE, A, 9), (1, HERE, B, 9), (2, THERE, A, 9))
    assert [tokens.before(RequestId(n)) for n in (1, 2, 3, 4)] == [0, 0, 1, None]
    tokens.remove(RequestId(1))
    tokens.remove(RequestId(1))
    assert tokens.before(RequestId(3)) == 0


def test_work_that_is_counted_elsewhere_takes_no_time_here() -> None:
    tokens = waiting((1, HERE, A, 100))
    tokens.add(HERE, RequestId(2))
    assert tokens.before(RequestId(2)) == 1
    assert tokens.own_ns(HERE, [A]) == LATENCY[A].prefill_ns(100)
    tokens.remove(RequestId(2))
    tokens.remove(RequestId(1))
    assert tokens.own_ns(HERE) == 0


def test_the_work_is_all_prefills_and_the_switches_they_take() -> None:
    tokens = waiting((1, HERE, A, 100), (2, HERE, A, 50), (3, HERE, B, 10))
    a, b = LATENCY[A], LATENCY[B]
    prefills_ns = {A: a.prefills_ns(2, 150, 100 * 100 + 50 * 50), B: b.prefill_ns(10) + b.switch_ns()}
    assert tokens.by_model_ns(HERE, [A]) == prefills_ns
    assert tokens.own_ns(HERE) == sum(prefills_ns.values()) + a.switch_ns()
    assert tokens.by_model_ns(THERE) == {} and tokens.foreign_ns(THERE) == 0
    tokens.set_foreign(HERE, 1_000_000)
    assert tokens.foreign_ns(HERE) == 1_000_000


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.sampled_from([HERE, THERE]), st.integers(1, 99))))
def test_whatever_comes_and_goes_nothing_is_left_when_all_have_gone(
    steps: list[tuple[int, bool, InstanceId, int]],
) -> None:
    tokens, here = FirstTokens(LATENCY), set()
    for number, comes, instance, length in steps:
        request = RequestId(number)
        if comes and request not in here:
            tokens.add(instance, request, Work(A, length))
            here.add(request)
        elif not comes:
            tokens.remove(request)
            here.discard(request)
    for request in here:
        assert tokens.before(request) is not None
        tokens.remove(request)
    assert tokens.own_ns(HERE) == tokens.own_ns(THERE) == 0
