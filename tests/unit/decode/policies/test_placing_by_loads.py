"""A model leaves its home only for more than the load of its weights costs, and goes where they can stay."""

from __future__ import annotations

import pytest

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import Weights, Work
from decode.policies.least_slack import LeastSlack
from proxy.routing.decode_lists import DecodeLists
from proxy.routing.demand import Demand

A, B, C, D, E = (ModelId(name) for name in "abcde")
X, Y = InstanceId("x"), InstanceId("y")
POLICY = LeastSlack()
GB = 10**9


def lists(load_ppm: int) -> DecodeLists:
    """Weights of 40 % of the memory of an instance, tokens of 1 % of its time."""

    def demand(model: ModelId, tokens: int) -> Demand:
        return Demand(10_000 * tokens, load_ppm, 400_000)

    models = (A, B, C, D, E)
    made = DecodeLists(dict.fromkeys(models, 1000), dict.fromkeys(models, 4 * GB), demand)
    made.up(X)
    made.up(Y)
    return made


class Requests:
    def __init__(self, made: DecodeLists) -> None:
        self.made = made
        self.number = 0

    def asked(self, instance: InstanceId, model: ModelId, *, goes: bool = True) -> None:
        self.number += 1
        self.made.add(instance, RequestId(self.number), Work(model, 10))
        if goes:
            self.made.remove(instance, RequestId(self.number))


@pytest.mark.parametrize(("load_ppm", "chosen"), [(200_000, Y), (2_000_000, X)])
def test_an_idle_model_leaves_its_home_for_more_than_its_load(load_ppm: int, chosen: InstanceId) -> None:
    """10 % of the time are more than the load costs that takes a fifth of the TTFT, a fifth of that, and less than one
    that takes the TTFT twice."""
    made = lists(load_ppm)
    requests = Requests(made)
    requests.asked(X, A)
    requests.asked(X, B, goes=False)
    assert POLICY.place(Work(A, 10), made) == chosen
    assert POLICY.why_place(Work(A, 10), made, chosen).because.startswith("home" if chosen == X else "6 % freer")


def test_weights_that_had_to_leave_keep_no_model_at_home() -> None:
    """Two models have room on an instance: the first of three has left."""
    made = lists(2_000_000)
    requests = Requests(made)
    for model in (A, B, C):
        requests.asked(X, model)
    requests.asked(X, C, goes=False)
    assert not made.weights(A, X).there and made.weights(B, X).there
    assert POLICY.place(Work(A, 10), made) == Y


@pytest.mark.parametrize(("load_ppm", "chosen"), [(2_000_000, Y), (900_000, X)])
def test_a_model_leaves_a_home_without_room_for_all_if_loads_take_longer_than_the_ttft(
    load_ppm: int, chosen: InstanceId
) -> None:
    """Its weights are there, but others' come back beside them, and another instance has room."""
    made = lists(load_ppm)
    requests = Requests(made)
    for model in (A, B, C):
        requests.asked(X, model)
    requests.asked(X, C, goes=False)
    assert made.weights(B, X) == Weights(there=True, fits=False)
    assert POLICY.place(Work(B, 10), made) == chosen
    requests.asked(Y, D)
    requests.asked(Y, E)
    assert made.weights(B, Y) == Weights(there=False, fits=False)
    assert POLICY.place(Work(B, 10), made) == X


def test_a_new_model_goes_where_its_weights_have_room() -> None:
    made = lists(2_000_000)
    requests = Requests(made)
    requests.asked(X, A)
    requests.asked(X, B)
    requests.asked(Y, C, goes=False)
    assert made.weights(D, X) == Weights(there=False, fits=False)
    assert made.weights(D, Y) == Weights(there=False, fits=True)
    assert POLICY.place(Work(D, 10), made) == Y, "though it is busy"


def test_a_model_that_went_elsewhere_wants_no_room_at_its_old_home() -> None:
    made = lists(2_000_000)
    requests = Requests(made)
    requests.asked(X, A)
    requests.asked(X, B)
    requests.asked(Y, A)
    assert made.weights(D, X).fits
    made.forget(B)
    made.down(Y)
    assert made.weights(D, X).fits and made.home(A) is None
