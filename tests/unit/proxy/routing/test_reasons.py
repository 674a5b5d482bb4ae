"""The reasons of placements, of every policy."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aegis.core.clock import NS_PER_S
from aegis.core.decision import Decision, DecisionKind
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, RequestId
from aegis.core.request import PLACES_NEED, Job, Sampling
from aegis.core.role import Role
from aegis.core.views import DecodePolicy, DecodeView, Work
from aegis.sim.faults.fake_models import make_spec
from decode.policies.least_slack import LeastSlack
from decode.policies.qlm import Qlm
from decode.policies.weighted_round_robin import WeightedRoundRobin
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.routing.events import Event, InstanceUp, ModelUp, PlacesSet, RequestArrived
from proxy.routing.router import Router

SPEC = make_spec(0, image_pages=3, block_bytes=1024)


def placed(policy: DecodePolicy, role: Role, *, explains: bool = True, priority: int = 0) -> list[Decision]:
    """Two requests of one model come, on two instances."""
    core = Router(GroupedFcfs(), policy, Hardware(), explains=explains)
    core.on(ModelUp(SPEC, 1000), 0)
    for number in range(2):
        core.on(InstanceUp(InstanceId(f"{role}-{number}"), role), 0)
    effects = []
    for number in (1, 2):
        job = Job(RequestId(number), 1, SPEC.model, (1, 2, 3), Sampling(max_tokens=9), number, priority=priority)
        effects += core.on(RequestArrived(job), number)
    return [effect for effect in effects if isinstance(effect, Decision)]


def test_a_request_is_told_with_its_place_and_the_next_best() -> None:
    _, second = placed(WeightedRoundRobin(), Role.MIXED)
    assert (second.at_ns, second.kind, second.requests) == (2, DecisionKind.PLACE, (2,))
    assert second.line == (
        f"request 2 of {SPEC.model} is to be served on mixed-0: joins 1 of its model, with room for 997 tokens"
    )
    first, _ = placed(LeastSlack(), Role.MIXED)
    assert first.why.lost == "mixed-1"


def test_a_place_that_was_set_is_the_reason_only_where_the_request_goes_there() -> None:
    core = Router(GroupedFcfs(), WeightedRoundRobin(), Hardware(), explains=True)
    one, other = InstanceId("mixed-0"), InstanceId("mixed-1")
    told = []
    for number, event in enumerate((ModelUp(SPEC, 1000), InstanceUp(one, Role.MIXED), InstanceUp(other, Role.MIXED))):
        core.on(event, number)
    for number, place in enumerate((other, InstanceId("mixed-2")), 1):
        core.on(PlacesSet(SPEC.model, (place,)), 5)
        effects = core.on(RequestArrived(Job(RequestId(number), 1, SPEC.model, (1,), Sampling(max_tokens=9), 6)), 6)
        told += [effect.why.because for effect in effects if isinstance(effect, Decision)]
    assert "its model was placed there" in told[0] and told[1].startswith("joins 1 of its model"), "mixed-2 is not up"


@pytest.mark.parametrize(("role", "how"), [(Role.MIXED, "served"), (Role.PREFILL, "prefilled")])
def test_a_priority_is_told_with_the_request(role: Role, how: str) -> None:
    first, _ = placed(WeightedRoundRobin(), role, priority=-1)
    assert first.what == f"request 1 of {SPEC.model}, of priority -1, is to be {how} on {role}-0"


def test_policies_without_words_of_their_own_are_explained_by_what_they_saw() -> None:
    first, second = placed(Qlm(), Role.MIXED)
    assert first.why.because == (
        "its model does not run there and has 0 requests, in a list of 0 batches; that of mixed-1 has 0 batches"
    )
    assert "has 1 requests, in a list of 1 batch;" in second.why.because


def test_prefills_are_told_too_and_nothing_where_nobody_asked() -> None:
    first, second = placed(WeightedRoundRobin(), Role.PREFILL)
    assert first.what == f"request 1 of {SPEC.model} is to be prefilled on prefill-0"
    assert second.why.because == "joins the first group of its model with room: 1 of 8"
    assert placed(WeightedRoundRobin(), Role.PREFILL, explains=False) == []


def failed(*events: Event, give_up_ns: int | None = None, explains: bool = True) -> list[Decision]:
    core = Router(GroupedFcfs(), Nowhere(), Hardware(), give_up_ns=give_up_ns, explains=explains)
    told = [effect for at, event in enumerate(events) for effect in core.on(event, at * NS_PER_S)]
    return [each for each in told if isinstance(each, Decision) and each.kind is DecisionKind.REFUSE]


class Nowhere(WeightedRoundRobin):
    """Has a place for no model."""

    def place(self, work: Work, lists: DecodeView) -> None:
        return None


MIXED, PREFILL = InstanceId("mixed-0"), InstanceId("prefill-0")
ARRIVES = RequestArrived(Job(RequestId(1), 1, SPEC.model, (1, 2, 3), Sampling(max_tokens=9), 0))


def test_a_request_without_a_place_is_told_with_its_deadline() -> None:
    events = (ModelUp(SPEC, 1000), InstanceUp(MIXED, Role.MIXED), ARRIVES)
    (told,) = failed(*events)
    assert (told.kind, told.instance, told.requests) == (DecisionKind.REFUSE, "-", (1,))
    because = f"no instance has a place for model '{SPEC.model}'; {PLACES_NEED}; its next token is due in 8 s"
    assert told.line == f"request 1 of {SPEC.model} is refused: {because}"
    assert told.why.slack_ns == 8 * NS_PER_S
    assert failed(*events, explains=False) == []
    (told,) = failed(*events[:2], RequestArrived(replace(ARRIVES.job, priority=2)))
    assert told.what == f"request 1 of {SPEC.model}, of priority 2, is refused"


def test_a_request_that_is_given_up_is_told_with_where_it_was() -> None:
    late = RequestArrived(Job(RequestId(2), 1, SPEC.model, (1, 2, 3), Sampling(max_tokens=9), 3 * NS_PER_S))
    (told,) = failed(ModelUp(SPEC, 1000), InstanceUp(PREFILL, Role.PREFILL), ARRIVES, late, give_up_ns=2 * NS_PER_S)
    assert (told.instance, told.requests) == (PREFILL, (1,))
    assert told.line == (
        f"request 1 of {SPEC.model} is given up after 0 tokens: "
        "it had no token for too long; its next token is due in 7 s"
    )
