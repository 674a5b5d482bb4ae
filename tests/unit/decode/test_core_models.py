"""The decode core, scripted: models and peers that come, go and fail."""

from __future__ import annotations

from aegis.core.effects import (
    LoadWeights,
    UnmapWeights,
    Untrack,
)
from aegis.core.events import LoadFailed
from aegis.core.ids import InstanceId, PageRun, ProxyId, RequestId, nth_request
from aegis.core.messages import (
    AddModel,
    Broken,
    Cancel,
    DropModel,
    DropProxy,
    EvictImage,
    ForgetPeer,
    GaveUp,
    ImageCached,
    ImageEvicted,
    ImageUnreadable,
    KvReleased,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    ModelUnloaded,
    PeerForgotten,
    ProxyDropped,
    ReleaseProxy,
    Submit,
    UnloadModel,
)
from tests.sim.driven import PEER, PEER_WORD, adopt, decode, make_job
from tests.unit.decode.turns import IN, TWO_MODELS_FIT, WEIGHTS, A, B, running, settle, step, take, two_turns

# --- peers -----------------------------------------------------------------------------------------------------------


def test_a_lost_peer_is_forgotten_after_the_last_copy_from_it() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    take(driven, 2, A)
    driven.complete(WEIGHTS)
    driven.complete(IN, 1)
    driven.on(ForgetPeer(PEER, (PEER_WORD,)))
    assert not driven.said(PeerForgotten), "request 2 is still being read"
    driven.complete(IN)
    assert driven.said(PeerForgotten) == [PeerForgotten(PEER)]
    assert step(driven) == [1], "what had arrived goes on"


def test_what_had_not_arrived_from_a_lost_peer_is_dropped() -> None:
    driven = two_turns(4)
    driven.on(ForgetPeer(PEER, (PEER_WORD,)))
    assert driven.said(PeerForgotten) == [PeerForgotten(PEER)] and driven.core.queued == 0
    assert driven.asked(Untrack) == [Untrack(RequestId(2))] and step(driven) == [1]


def test_what_the_next_process_of_a_lost_peer_handed_over_stays() -> None:
    """Nobody would prefill it again: the proxy, which told of it, has lost nothing since."""
    driven = two_turns(4)
    driven.on(ForgetPeer(PEER, (PEER_WORD - 1,)))
    assert driven.said(PeerForgotten) == [PeerForgotten(PEER)] and driven.core.queued + driven.core.running == 2


def test_each_question_about_a_peer_is_answered() -> None:
    """It was lost twice while a copy from it was under way."""
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    driven.complete(WEIGHTS)
    driven.on(ForgetPeer(PEER, (PEER_WORD,)))
    driven.on(ForgetPeer(PEER, (PEER_WORD,)))
    driven.on(ForgetPeer(InstanceId("prefill-3"), (PEER_WORD + 1,)))
    assert driven.said(PeerForgotten) == [PeerForgotten(InstanceId("prefill-3"))]
    driven.complete(IN)
    assert driven.said(PeerForgotten) == [PeerForgotten(PEER)] * 2


# --- proxies ---------------------------------------------------------------------------------------------------------

LOST, OTHER = ProxyId(1), ProxyId(2)


def test_a_lost_proxy_is_dropped_after_the_last_copy_for_it() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    there, coming, kept = nth_request(LOST, 1), nth_request(LOST, 2), nth_request(OTHER, 1)
    for request in (there, coming, kept):
        take(driven, request, A)
    driven.complete(WEIGHTS)
    driven.complete(IN, 1)
    driven.on(DropProxy(LOST))
    assert not driven.said(ProxyDropped), "KV of the second is still being read"
    assert driven.asked(Untrack) == [Untrack(there), Untrack(coming)]
    driven.complete(IN)
    assert driven.said(ProxyDropped) == [ProxyDropped(LOST)]
    assert step(driven) == [kept]


def test_who_has_nothing_of_a_lost_proxy_says_so_at_once() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    driven.on(DropProxy(LOST))
    assert driven.said(ProxyDropped) == [ProxyDropped(LOST)]
    driven.on(ReleaseProxy(LOST))
    assert driven.last == []


def test_requests_of_a_model_that_was_dropped_break_and_release_their_kv() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    driven.on(DropModel(A.model))
    driven.on(Submit(make_job(1, A)))
    assert [message.request for message in driven.said(Broken)] == [1]
    take(driven, 2, A)
    assert [message.request for message in driven.said(Broken)] == [2]
    assert [message.request for message in driven.said(KvReleased)] == [2]
    assert driven.core.queued == 0


# --- models ----------------------------------------------------------------------------------------------------------


def test_models_come_and_go() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    assert driven.said(ModelAdded, driven.effects) == [ModelAdded(A.model)]
    take(driven, 1, A, max_tokens=2)
    settle(driven)
    driven.stepped(2)
    driven.on(DropModel(A.model))
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]
    assert driven.core.active is None and driven.core.ledger.pool.used == 0
    driven.on(AddModel(A))
    take(driven, 2, A)
    settle(driven)
    assert running(driven) == [2]


def test_a_job_of_a_model_that_was_dropped_ends_and_its_kv_is_released() -> None:
    """Who sent it had not learned that yet."""
    driven = decode(A, B, pages=TWO_MODELS_FIT)
    driven.on(DropModel(A.model))
    late = adopt(make_job(1, A), A)
    driven.on(late)
    assert driven.said(KvReleased) == [KvReleased(RequestId(1), 1, late.kv)]
    assert [broken.request for broken in driven.said(Broken)] == [1]
    driven.on(Submit(make_job(2, A)))
    assert [broken.request for broken in driven.said(Broken)] == [2]
    assert driven.core.queued == 0


def test_a_model_is_dropped_when_it_has_loaded() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    driven.on(Cancel(RequestId(1), 1))
    driven.on(DropModel(A.model))
    assert not driven.said(ModelDropped)
    driven.complete(WEIGHTS)
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]


def test_a_model_is_dropped_after_the_step_that_uses_it() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    settle(driven)
    driven.on(Cancel(RequestId(1), 1))
    driven.on(DropModel(A.model))
    assert not driven.said(ModelDropped)
    driven.stepped(2)
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]


def test_an_idle_model_is_unloaded_at_once_and_its_next_request_loads_it() -> None:
    driven = decode(A, B, pages=TWO_MODELS_FIT)
    take(driven, 1, A, max_tokens=2)
    settle(driven)
    driven.stepped(2)
    assert driven.core.ledger.weights.resident() == (A.model,)
    driven.on(UnloadModel(A.model))
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)]
    assert driven.said(ModelUnloaded) == [ModelUnloaded(A.model)]
    assert driven.core.active is None and driven.core.ledger.pool.used == 0
    take(driven, 2, A)
    settle(driven)
    assert running(driven) == [2] and driven.loads == [A.model, A.model]


def test_a_model_in_use_is_unloaded_once_after_its_last_request() -> None:
    driven = decode(A, B, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    settle(driven)
    driven.on(UnloadModel(A.model))
    driven.on(UnloadModel(A.model))
    take(driven, 2, A, max_tokens=2)
    settle(driven)
    driven.on(Cancel(RequestId(1), 1))
    assert not driven.asked(UnmapWeights, driven.effects), "the second is there still"
    while driven.core.queued + driven.core.running:
        step(driven)
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)]
    take(driven, 3, A, max_tokens=2)
    settle(driven)
    driven.stepped(2)
    assert driven.said(ModelUnloaded, driven.effects) == [ModelUnloaded(A.model)]
    assert driven.core.ledger.weights.resident() == (A.model,), "it was asked for once"


def test_a_model_that_nobody_waits_for_any_more_is_unloaded_when_its_load_has_stopped() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    driven.on(UnloadModel(A.model))
    driven.on(Cancel(RequestId(1), 1))
    assert not driven.said(ModelUnloaded)
    driven.complete(WEIGHTS)
    assert driven.said(ModelUnloaded) == [ModelUnloaded(A.model)]
    assert not driven.core.ledger.weights.resident()


def test_unloading_what_has_no_weights_here_is_answered() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    for model in (A.model, B.model):
        driven.on(UnloadModel(model))
        assert driven.said(ModelUnloaded) == [ModelUnloaded(model)]


def test_dropping_a_model_that_could_not_be_added_is_answered() -> None:
    driven = decode(pages=8)
    driven.core.ledger._ranges.capacity = 2
    driven.on(AddModel(A))
    assert [message.model for message in driven.said(ModelFailed)] == [A.model]
    driven.on(DropModel(A.model))
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]


def test_who_waits_for_a_model_that_cannot_be_read_is_given_up_and_the_next_tries_again() -> None:
    driven = decode(A, B, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    take(driven, 2, A)
    take(driven, 3, B)
    driven.on(LoadFailed(A.model, "why"))
    assert driven.said(ImageUnreadable) == [ImageUnreadable(A.model, "why")]
    assert driven.said(GaveUp) == [GaveUp(RequestId(request), 1) for request in (1, 2)]
    assert driven.core.counters.abandoned == 0, "nobody gave it up"
    take(driven, 4, A)
    assert A.model not in driven.loads[1:], "what is there is not its weights"
    driven.complete(WEIGHTS)
    settle(driven)
    while running(driven) != [4]:
        step(driven)
        settle(driven)
    assert driven.loads.count(A.model) == 2


def test_an_image_is_let_go_of_when_the_load_from_it_has_passed() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    driven.on(ImageCached(A.model, (PageRun(3, 6),)))
    take(driven, 1, A)
    assert [load.cached for load in driven.asked(LoadWeights)] == [(PageRun(3, 6),)]
    driven.on(EvictImage(A.model))
    assert not driven.said(ImageEvicted)
    driven.complete(WEIGHTS)
    assert driven.said(ImageEvicted) == [ImageEvicted(A.model)]
    driven.complete(IN)
    assert running(driven) == [1], "the weights on the device stay"
