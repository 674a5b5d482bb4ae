"""The router moves models with their requests from instance to instance, whatever happens on the way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import (
    Adopt,
    BringIn,
    BroughtIn,
    Cancel,
    GaveUp,
    HandedOver,
    HandOver,
    KvReleased,
    Prefilled,
    ReleaseKv,
    Started,
    Submit,
    Tokens,
)
from aegis.core.request import EventHandle, FinishReason, KvHandle, Token
from proxy.routing.events import (
    ClientLeft,
    Ended,
    ForeignLoad,
    InstanceDown,
    ModelLoad,
    ModelMoved,
    ModelRemoved,
    MoveModel,
    PlacesSet,
    Replayed,
)
from proxy.routing.moves import kv_is_cheaper
from tests.unit.proxy.routing.router_stand import D0, D1, OTHER, P0, SPEC, Proxy, R, handle

M0, M1, M2 = (InstanceId(f"mixed-{number}") for number in range(3))
MODEL = SPEC.model


def decoding(*instances: InstanceId, tokens: int = 2) -> Proxy:
    """Request 1 on the first of these mixed instances, with so many tokens."""
    proxy = Proxy(*instances)
    proxy.arrive()
    proxy.heard(M0, Started(R, 1))
    proxy.heard(M0, Prefilled(R, 1, Token(10), None, 5))
    proxy.decodes(decode=M0)
    proxy.heard(M0, Tokens(R, 1, 1, tuple(Token(10 + n) for n in range(1, tokens))))
    return proxy


def own(owner: InstanceId) -> KvHandle:
    return KvHandle(owner, ((5, 6),), 5, EventHandle(3, 1))


def asked(proxy: Proxy, target: InstanceId = M1) -> None:
    """The request of a move to the target is to be handed over."""
    proxy.tell(MoveModel(MODEL, target))
    assert proxy.all_sent() == [(target, BringIn(MODEL))]
    proxy.heard(target, BroughtIn(MODEL, there=True))
    assert proxy.all_sent() == [(M0, HandOver(R, 1))]


def moved(proxy: Proxy) -> list[ModelMoved]:
    return [effect for effect in proxy.last if isinstance(effect, ModelMoved)]


def test_a_request_moves_with_its_kv_once_the_target_holds_the_model() -> None:
    proxy = decoding(M0, M1)
    asked(proxy)
    proxy.heard(M0, Tokens(R, 1, 2, (Token(12),)))
    proxy.heard(M0, HandedOver(R, 1, 3, own(M0)))
    ((to, adopt),) = proxy.sent(Adopt)
    assert to == M1 and adopt.tokens == (10, 11, 12) and adopt.kv == own(M0)
    assert moved(proxy) == [ModelMoved(MODEL, M1, 1, 0, kv_tokens=5)] and proxy.state() is State.PREEMPTED
    proxy.heard(M1, KvReleased(R, 1, own(M0)))
    assert proxy.sent(ReleaseKv) == [(M0, ReleaseKv(R, 1))]
    proxy.decodes(decode=M1)
    assert proxy.state() is State.DECODING
    proxy.heard(M1, Tokens(R, 1, 3, (Token(13),), FinishReason.LENGTH))
    assert proxy.delivered[R] == [10, 11, 12, 13] and not proxy.core._handles


def test_what_comes_later_goes_there_too() -> None:
    proxy = decoding(M0, M1)
    proxy.tell(MoveModel(MODEL, M1))
    proxy.arrive(2)
    assert [to for to, _ in proxy.sent(Submit)] == [M0], "the target has not brought the model in"
    proxy.heard(M1, BroughtIn(MODEL, there=True))
    assert [to for to, _ in proxy.sent(HandOver)] == [M0, M0]
    for number in range(3, 6):
        proxy.arrive(number)
        assert [to for to, _ in proxy.sent(Submit)] == [M1]
    proxy.arrive(6, model=OTHER.model)
    assert [to for to, _ in proxy.sent(Submit)] == [M0], "the policy places other models"


def test_one_without_a_token_is_prefilled_there() -> None:
    proxy = Proxy(M0, M1)
    proxy.arrive()
    asked(proxy)
    proxy.heard(M0, HandedOver(R, 1, 0, None))
    ((to, submit),) = proxy.sent(Submit)
    assert to == M1 and submit.job.attempt == 2 and Replayed(R) in proxy.last
    assert moved(proxy) == [ModelMoved(MODEL, M1, 0, 1)]


def test_where_a_prefill_takes_less_time_than_its_kv_that_is_not_wanted() -> None:
    proxy = decoding(M0, M1)
    proxy.core._hardware = Hardware(copy_bytes_per_s=1.0)
    proxy.tell(MoveModel(MODEL, M1))
    proxy.heard(M1, BroughtIn(MODEL, there=True))
    assert proxy.sent(HandOver) == [(M0, HandOver(R, 1, with_kv=False))]
    proxy.heard(M0, HandedOver(R, 1, 2, None))
    ((to, submit),) = proxy.sent(Submit)
    assert to == M1 and submit.job.sent == (10, 11)


def test_what_is_cheaper_is_a_matter_of_the_link() -> None:
    for bytes_per_s, cheaper in ((1e12, True), (1e3, False)):
        hardware = Hardware(copy_bytes_per_s=bytes_per_s)
        assert kv_is_cheaper(SPEC, Latency(SPEC.manifest, hardware), hardware, 100) is cheaper


def test_only_requests_of_one_source_leave_where_one_is_named() -> None:
    proxy = decoding(M0, M1, M2)
    proxy.tell(MoveModel(MODEL, M1, M2))
    proxy.heard(M1, BroughtIn(MODEL, there=True))
    assert not proxy.sent(HandOver) and moved(proxy) == [ModelMoved(MODEL, M1, 0, 0)]


def test_placement_sees_tokens_that_were_made_ahead_of_the_clock() -> None:
    _, loads = decoding(M0, M1, tokens=9).core.sample()
    (load,) = loads[M0]
    assert (load.tokens, load.ahead_tokens, load.largest_tokens) == (4, 9, 13)


def test_of_requests_of_other_proxies_it_does_not_see_how_large_they_are() -> None:
    proxy = decoding(M0, M1, tokens=9)
    proxy.tell(ForeignLoad(M0, 0, (ModelLoad(MODEL, 1, 50),)))
    _, loads = proxy.core.sample()
    (load,) = loads[M0]
    assert (load.requests, load.tokens, load.ahead_tokens, load.largest_tokens) == (2, 54, 0, 0)


@pytest.mark.parametrize(("share_ppm", "leave"), [(1, 1), (250_000, 1), (250_001, 2), (750_001, 4), (1_000_000, 4)])
def test_of_a_part_the_last_to_have_come_leave(share_ppm: int, leave: int) -> None:
    """As few whole ones as have that share of the tokens."""
    proxy = Proxy(M0, M1)
    for number in range(1, 5):
        proxy.arrive(number)
    proxy.tell(MoveModel(MODEL, M1, M0, (M1, M0), share_ppm))
    proxy.heard(M1, BroughtIn(MODEL, there=True))
    asked = [order.request for to, order in proxy.sent(HandOver) if to == M0]
    assert asked == [RequestId(number) for number in range(5 - leave, 5)]


@pytest.mark.parametrize("with_kv", [True, False])
def test_it_goes_to_the_target_though_another_of_the_places_has_less_to_do(with_kv: bool) -> None:
    proxy = decoding(M0, M1, M2)
    proxy.tell(PlacesSet(OTHER.model, (M1,)))
    proxy.arrive(2, model=OTHER.model)
    assert [to for to, _ in proxy.sent(Submit)] == [M1]
    proxy.tell(MoveModel(MODEL, M1, M0, (M1, M2)))
    proxy.heard(M1, BroughtIn(MODEL, there=True))
    proxy.heard(M0, HandedOver(R, 1, 2, own(M0) if with_kv else None))
    assert [to for to, _ in proxy.sent(Adopt if with_kv else Submit)] == [M1]
    proxy.arrive(3)
    assert [to for to, _ in proxy.sent(Submit)] == [M2], "that is for those that come"


def test_requests_that_are_there_stay() -> None:
    proxy = decoding(M0, M1)
    proxy.tell(MoveModel(MODEL, M0))
    proxy.heard(M0, BroughtIn(MODEL, there=True))
    assert not proxy.all_sent() and moved(proxy) == [ModelMoved(MODEL, M0, 0, 0)]


def test_between_decode_instances_the_prefill_stays_where_it_is() -> None:
    proxy = Proxy(P0, D0, D1)
    proxy.reach("decoding")
    proxy.tell(MoveModel(MODEL, D1))
    proxy.heard(D1, BroughtIn(MODEL, there=False))
    assert proxy.sent(HandOver) == [(D0, HandOver(R, 1))]
    proxy.heard(D0, HandedOver(R, 1, 2, own(D0)))
    assert [to for to, _ in proxy.sent(Adopt)] == [D1]
    proxy.arrive(2)
    proxy.heard(P0, Started(RequestId(2), 1))
    proxy.prefilled(request=RequestId(2))
    assert [to for to, _ in proxy.sent(Adopt)] == [D1]


def test_kv_that_had_not_arrived_is_adopted_from_its_owner() -> None:
    """Law 3: released once, by whoever has adopted it last."""
    proxy = Proxy(P0, D0, D1)
    proxy.reach("handed off")
    proxy.tell(MoveModel(MODEL, D1))
    proxy.heard(D1, BroughtIn(MODEL, there=True))
    proxy.heard(D0, HandedOver(R, 1, 1, handle(P0)))
    assert [(to, adopt.kv) for to, adopt in proxy.sent(Adopt)] == [(D1, handle(P0))] and not proxy.sent(ReleaseKv)
    proxy.heard(D1, KvReleased(R, 1, handle(P0)))
    assert proxy.sent(ReleaseKv) == [(P0, ReleaseKv(R, 1))] and not proxy.core._handles


# --- what goes wrong on the way --------------------------------------------------------------------------------------


def test_a_target_that_is_lost_before_it_holds_the_model_changes_nothing() -> None:
    proxy = decoding(M0, M1)
    proxy.tell(MoveModel(MODEL, M1))
    proxy.tell(InstanceDown(M1))
    assert not proxy.all_sent() and moved(proxy) == [ModelMoved(MODEL, M1, 0, 0, "mixed-1 was lost")]


def test_a_target_that_is_lost_later_leaves_the_request_where_there_is_a_place() -> None:
    """The source takes its own KV back, and does not say that it is released."""
    proxy = decoding(M0, M1)
    asked(proxy)
    proxy.tell(InstanceDown(M1))
    assert not moved(proxy)
    proxy.heard(M0, HandedOver(R, 1, 2, own(M0)))
    assert [to for to, _ in proxy.sent(Adopt)] == [M0] and not proxy.core._handles
    assert moved(proxy) == [ModelMoved(MODEL, M1, 1, 0, "mixed-1 was lost", 5)]


def test_a_target_that_is_lost_with_the_request_has_it_prefilled_elsewhere() -> None:
    proxy = decoding(M0, M1)
    asked(proxy)
    proxy.heard(M0, HandedOver(R, 1, 2, own(M0)))
    proxy.tell(InstanceDown(M1))
    assert proxy.sent(ReleaseKv) == [(M0, ReleaseKv(R, 1))]
    assert [(to, submit.job.sent) for to, submit in proxy.sent(Submit)] == [(M0, (10, 11))]


def test_a_source_that_is_lost_has_it_prefilled_at_the_target() -> None:
    proxy = decoding(M0, M1)
    asked(proxy)
    proxy.tell(InstanceDown(M0))
    assert [(to, submit.job.sent) for to, submit in proxy.sent(Submit)] == [(M1, (10, 11))]
    assert moved(proxy) == [ModelMoved(MODEL, M1, 0, 0)]


def test_a_source_that_is_lost_before_its_kv_has_arrived_takes_it_along() -> None:
    proxy = decoding(M0, M1)
    asked(proxy)
    proxy.heard(M0, HandedOver(R, 1, 2, own(M0)))
    proxy.tell(InstanceDown(M0))
    assert proxy.sent(Cancel) == [(M1, Cancel(R, 1))] and not proxy.sent(ReleaseKv)
    assert [(to, submit.job.attempt) for to, submit in proxy.sent(Submit)] == [(M1, 2)]


def test_a_source_may_be_lost_once_its_kv_has_arrived() -> None:
    proxy = decoding(M0, M1)
    asked(proxy)
    proxy.heard(M0, HandedOver(R, 1, 2, own(M0)))
    proxy.heard(M1, KvReleased(R, 1, own(M0)))
    proxy.tell(InstanceDown(M0))
    assert proxy.last == []


@pytest.mark.parametrize("kv", [None, own(M0)], ids=["without KV", "with KV"])
def test_a_client_that_left_meanwhile_has_its_kv_released(kv: KvHandle | None) -> None:
    proxy = decoding(M0, M1)
    asked(proxy)
    proxy.tell(ClientLeft(R))
    assert proxy.sent(Cancel) == [(M0, Cancel(R, 1))] and moved(proxy) == [ModelMoved(MODEL, M1, 0, 0)]
    proxy.heard(M0, HandedOver(R, 1, 2, kv))
    assert proxy.all_sent() == ([(M0, ReleaseKv(R, 1))] if kv else [])


def test_a_client_that_left_before_passed_on_kv_came_back_has_it_released_by_its_owner() -> None:
    proxy = Proxy(P0, D0, D1)
    proxy.reach("handed off")
    proxy.tell(MoveModel(MODEL, D1))
    proxy.heard(D1, BroughtIn(MODEL, there=True))
    proxy.tell(ClientLeft(R))
    proxy.heard(D0, HandedOver(R, 1, 1, handle(P0)))
    assert proxy.all_sent() == [(P0, ReleaseKv(R, 1))] and not proxy.core._handles


def test_passed_on_kv_of_an_owner_that_is_lost_is_nobodys() -> None:
    proxy = Proxy(P0, D0, D1)
    proxy.reach("handed off")
    proxy.tell(MoveModel(MODEL, D1))
    proxy.heard(D1, BroughtIn(MODEL, there=True))
    proxy.tell(InstanceDown(P0))
    proxy.up(P0)
    proxy.heard(D0, HandedOver(R, 1, 1, handle(P0)))
    assert not proxy.sent(ReleaseKv) and not proxy.sent(Adopt), "another process has that name now"


def test_one_that_ends_or_is_given_up_before_is_not_waited_for() -> None:
    proxy = decoding(M0, M1)
    asked(proxy)
    proxy.heard(M0, Tokens(R, 1, 2, (Token(12),), FinishReason.STOP))
    assert moved(proxy) == [ModelMoved(MODEL, M1, 0, 0)] and any(isinstance(e, Ended) for e in proxy.last)
    proxy = decoding(M0, M1)
    asked(proxy)
    proxy.heard(M0, GaveUp(R, 1))
    assert [to for to, _ in proxy.sent(Submit)] == [M1] and moved(proxy) == [ModelMoved(MODEL, M1, 0, 0)]


def test_a_model_that_is_removed_moves_no_more() -> None:
    proxy = decoding(M0, M1)
    asked(proxy)
    proxy.tell(ModelRemoved(MODEL))
    assert moved(proxy) == [ModelMoved(MODEL, M1, 0, 0, "the model was removed")]
    proxy.heard(M0, HandedOver(R, 1, 2, own(M0)))
    assert proxy.all_sent() == [(M0, ReleaseKv(R, 1))]


def test_a_later_move_takes_the_place_of_an_earlier_one() -> None:
    proxy = decoding(M0, M1, M2)
    asked(proxy)
    proxy.tell(MoveModel(MODEL, M2, number=7))
    assert moved(proxy) == [ModelMoved(MODEL, M1, 0, 0, "another move took its place")]
    proxy.heard(M2, BroughtIn(MODEL, there=True))
    proxy.heard(M0, HandedOver(R, 1, 2, own(M0)))
    assert [to for to, _ in proxy.sent(Adopt)] == [M2] and moved(proxy) == [ModelMoved(MODEL, M2, 1, 0, "", 5, 7)]


def test_answers_to_others_questions_move_nothing() -> None:
    """All proxies hear that a model was brought in, and one of them may have asked twice."""
    proxy = decoding(M0, M1)
    proxy.heard(M1, BroughtIn(MODEL, there=True))
    assert proxy.last == []
    asked(proxy)
    proxy.heard(M1, BroughtIn(MODEL, there=True))
    assert proxy.last == []


def test_where_nothing_can_move_that_is_said() -> None:
    proxy = decoding(M0)
    assert proxy.tell(MoveModel(MODEL, M1, number=7)) == [ModelMoved(MODEL, M1, 0, 0, "mixed-1 is not up", number=7)]
    gone = replace(SPEC, model="gone").model
    assert proxy.tell(MoveModel(gone, M0)) == [ModelMoved(gone, M0, 0, 0, "there is no such model")]
