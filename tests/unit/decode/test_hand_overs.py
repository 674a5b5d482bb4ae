"""Sequences that go on elsewhere, and models whose requests come from elsewhere."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aegis.core.effects import EndRun, Run, Untrack
from aegis.core.events import LoadFailed
from aegis.core.ids import RequestId
from aegis.core.messages import (
    Adopt,
    BringIn,
    Broken,
    BroughtIn,
    DropModel,
    HandedOver,
    HandOver,
    KvReleased,
    NeedSlabs,
    Phase,
    Prefilled,
    ReleaseKv,
    ReleaseProxy,
    Submit,
    Tokens,
    UnloadModel,
)
from aegis.core.request import EventHandle, KvHandle
from decode.core import DecodeCore
from tests.sim.driven import PEER, WORDS, Driven, adopt, decode, make_job
from tests.unit.decode.test_core_chunks import Cutting, chunked, first_chunk
from tests.unit.decode.turns import IN, OUT, PREFETCH, TWO_MODELS_FIT, WEIGHTS, A, B, C, running, settle, step, take

R = RequestId(1)


def decoding(*, slabs: int | None = 64) -> Driven[DecodeCore]:
    """Requests 1 and 2 in a step; there is room for another model."""
    driven = decode(A, B, pages=30, slabs=slabs)
    take(driven, 1, A, prompt=20)
    take(driven, 2, A, prompt=20)
    settle(driven)
    step(driven)
    assert running(driven) == [1, 2]
    return driven


def handed(driven: Driven[DecodeCore]) -> KvHandle:
    (message,) = driven.said(HandedOver)
    assert message.kv is not None
    return message.kv


def test_it_leaves_with_its_kv_at_the_end_of_its_step_and_the_others_go_on() -> None:
    driven = decoding()
    driven.on(HandOver(R, 1))
    assert driven.asked(EndRun) and not driven.said(HandedOver), "it is in a run"
    assert step(driven, token=3) == [2]
    kv = handed(driven)
    assert driven.said(HandedOver) == [HandedOver(R, 1, 3, kv)]
    assert kv.owner == driven.core.instance and kv.tokens == 22 and kv.ready == EventHandle(WORDS[OUT], 1)
    assert driven.said(Phase) == [Phase((R,), running=False)] and driven.asked(Untrack) == [Untrack(R)]
    assert driven.core.ledger.host.use()[A.manifest.kv].used == 2 and driven.core.hand_overs.handed == 1


def test_its_kv_is_kept_until_it_is_released() -> None:
    driven = decoding()
    driven.on(HandOver(R, 1))
    step(driven)
    driven.complete(OUT)
    assert driven.core.ledger.host.use()[A.manifest.kv].used == 2
    driven.on(ReleaseKv(R, 1))
    assert not driven.core.ledger.host.use() and driven.core.hand_overs.handed == 0


def test_kv_that_is_released_before_it_was_moved_out_is_free_only_then() -> None:
    driven = decoding()
    driven.on(HandOver(R, 1))
    step(driven)
    driven.on(ReleaseKv(R, 1))
    assert driven.core.ledger.host.use()[A.manifest.kv].moving == 2
    driven.complete(OUT)
    assert not driven.core.ledger.host.use()


def test_that_of_a_lost_proxy_is_freed_when_nobody_reads_it() -> None:
    driven = decoding()
    driven.on(HandOver(R, 1))
    step(driven)
    driven.complete(OUT)
    driven.on(ReleaseProxy(1))  # type: ignore[arg-type]
    assert driven.core.hand_overs.handed == 1
    driven.on(ReleaseProxy(0))  # type: ignore[arg-type]
    assert driven.core.hand_overs.handed == 0 and not driven.core.ledger.host.use()


def test_it_may_end_with_that_step() -> None:
    driven = decoding()
    driven.on(HandOver(R, 1))
    driven.stepped(7, 2)  # its stop token
    assert not driven.said(HandedOver) and running(driven) == [2]


def test_without_kv_nothing_is_moved() -> None:
    driven = decoding()
    driven.on(HandOver(R, 1, with_kv=False))
    step(driven)
    assert driven.said(HandedOver) == [HandedOver(R, 1, 3, None)]
    assert not driven.under_way(OUT) and not driven.core.ledger.host.use()


def test_one_whose_prefill_has_not_begun_is_let_go() -> None:
    driven = decode(A, B, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    settle(driven)
    driven.on(Submit(make_job(2, B, prompt=20)))
    driven.on(HandOver(RequestId(2), 1))
    assert driven.said(HandedOver) == [HandedOver(RequestId(2), 1, 0, None)]


def test_a_prefill_under_way_is_finished() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A, prompt=20)))
    driven.complete(WEIGHTS)
    assert driven.asked(Run)
    driven.on(HandOver(R, 1))
    assert not driven.said(HandedOver)
    driven.ran(token=5)
    assert [message.token.id for message in driven.said(Prefilled)] == [5]
    assert driven.said(HandedOver) == [HandedOver(R, 1, 1, handed(driven))] and handed(driven).tokens == 20


def test_a_prefill_of_which_pieces_have_run_is_finished() -> None:
    driven = first_chunk(Cutting(1))
    driven.on(HandOver(R, 1))
    for _ in range(2):
        chunked(driven)
        assert not driven.said(HandedOver) and driven.prompts()
    driven.ran(token=5)
    assert handed(driven).tokens == 40


def test_kv_that_has_not_arrived_is_passed_on() -> None:
    """It is never on this device; its owner keeps it for whoever adopts it then."""
    driven = decode(A, B, pages=4)
    take(driven, 1, A)
    settle(driven)
    message = adopt(make_job(2, B), B, first_block=200)
    driven.on(message)
    driven.on(HandOver(RequestId(2), 1))
    assert driven.said(HandedOver) == [HandedOver(RequestId(2), 1, 1, message.kv)]
    assert not driven.said(KvReleased) and driven.core.hand_overs.handed == 0


def test_kv_that_arrives_is_waited_for() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    driven.complete(WEIGHTS)
    driven.on(HandOver(R, 1))
    assert not driven.said(HandedOver)
    driven.complete(IN)
    assert driven.said(KvReleased) and handed(driven).owner == driven.core.instance


def test_where_the_host_has_no_slab_it_is_prefilled_again() -> None:
    driven = decoding(slabs=None)
    driven.on(HandOver(R, 1))
    step(driven)
    assert driven.said(NeedSlabs) and not driven.said(HandedOver)
    driven.granted(refused=True)
    assert driven.said(HandedOver) == [HandedOver(R, 1, 3, None)]


def test_one_that_comes_back_before_anybody_else_had_it_goes_on_from_its_own_kv() -> None:
    """Nobody says that it is released: the owner could take that for a word about the next time."""
    driven = decoding()
    driven.on(HandOver(R, 1))
    step(driven)
    driven.complete(OUT)
    kv = handed_first(driven)
    driven.on(Adopt(make_job(1, A, prompt=20), (1, 2, 2), kv))
    assert not driven.said(KvReleased) and driven.core.hand_overs.handed == 0
    step(driven)
    settle(driven)
    assert [m.kv.owner for m in driven.said(KvReleased, driven.effects)] == [PEER, PEER], "of both adoptions before"
    assert not driven.core.ledger.host.use()
    driven.on(HandOver(R, 1))
    step(driven)
    assert len(driven.said(HandedOver, driven.effects)) == 2


def handed_first(driven: Driven[DecodeCore]) -> KvHandle:
    (message,) = driven.said(HandedOver, driven.effects)
    assert message.kv is not None
    return message.kv


def test_its_own_kv_of_a_model_that_was_removed_is_freed() -> None:
    driven = decoding()
    driven.on(HandOver(R, 1))
    step(driven)
    driven.complete(OUT)
    driven.on(Adopt(replace(make_job(1, A, prompt=20), model=C.model), (1, 2, 2), handed_first(driven)))
    assert driven.said(Broken) and not driven.said(KvReleased)
    assert driven.core.hand_overs.handed == 0 and not driven.core.ledger.host.use()


@pytest.mark.parametrize("message", [HandOver(RequestId(9), 1), HandOver(R, 2)], ids=["not there", "another attempt"])
def test_who_is_not_there_is_not_handed_over(message: HandOver) -> None:
    driven = decoding()
    driven.on(message)
    step(driven)
    assert not driven.said(HandedOver, driven.effects) and running(driven) == [1, 2]


def test_two_questions_have_one_answer() -> None:
    driven = decoding()
    driven.on(HandOver(R, 1))
    driven.on(HandOver(R, 1))
    step(driven)
    assert len(driven.said(HandedOver, driven.effects)) == 1


def test_tokens_of_its_last_step_come_first() -> None:
    """They leave as the step ends; a first token does with the core's own messages."""
    driven = decode(A, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A, prompt=20)))
    driven.complete(WEIGHTS)
    driven.on(HandOver(R, 1))
    driven.ran(token=5)
    said = [type(message) for message in (*driven.said(Prefilled), *driven.said(HandedOver), *driven.said(Tokens))]
    assert said == [Prefilled, HandedOver]


# --- models ----------------------------------------------------------------------------------------------------------


def test_a_model_is_brought_in_while_another_one_runs() -> None:
    driven = decoding()
    driven.on(BringIn(B.model))
    assert driven.loads[-1] == B.model and not driven.said(BroughtIn)
    assert step(driven) == [1, 2], "nobody waits for it, and it is not abandoned"
    driven.complete(PREFETCH)
    assert driven.said(BroughtIn) == [BroughtIn(B.model, there=True)]


def test_one_that_is_there_is_so_at_once() -> None:
    driven = decoding()
    driven.on(BringIn(A.model))
    assert driven.said(BroughtIn) == [BroughtIn(A.model, there=True)]


def test_one_that_has_no_room_waits_for_its_turn() -> None:
    driven = decode(A, B, pages=5)
    take(driven, 1, A)
    settle(driven)
    driven.on(BringIn(B.model))
    assert driven.said(BroughtIn) == [BroughtIn(B.model, there=False)] and driven.loads == [A.model]


def test_one_that_had_to_make_way_is_not_brought_in_again() -> None:
    """It would take the room from the turn that needs it, again and again."""
    driven = decode(A, B, pages=TWO_MODELS_FIT)
    driven.on(BringIn(B.model))
    assert driven.loads == [B.model]
    driven.core.ledger.abandon(B.model)
    driven.core.ledger.drain()
    driven.complete(PREFETCH)
    assert driven.said(BroughtIn, driven.effects) == [BroughtIn(B.model, there=False)] and driven.loads == [B.model]


def test_one_whose_load_failed_is_brought_in_by_the_next_question() -> None:
    driven = decode(A, B, pages=TWO_MODELS_FIT)
    driven.on(BringIn(B.model))
    driven.on(LoadFailed(B.model, "why"))
    assert driven.said(BroughtIn) == [BroughtIn(B.model, there=False)]
    driven.complete(PREFETCH)
    driven.on(BringIn(B.model))
    assert driven.loads == [B.model, B.model] and not driven.said(BroughtIn)
    driven.complete(PREFETCH)
    assert driven.said(BroughtIn) == [BroughtIn(B.model, there=True)]


def test_a_model_that_is_removed_meanwhile_is_not_there() -> None:
    driven = decode(A, B, pages=TWO_MODELS_FIT)
    driven.on(BringIn(B.model))
    driven.on(DropModel(B.model))
    driven.complete(PREFETCH)
    assert [message.model for message in driven.said(BroughtIn, driven.effects)] == [B.model]
    driven.on(BringIn(B.model))
    assert driven.said(BroughtIn) == [BroughtIn(B.model, there=False)]
    driven.on(UnloadModel(A.model))
    assert not driven.said(BroughtIn)
