"""KV from another machine: fetched into host slabs first, then the sequence is like any other."""

from __future__ import annotations

from msgspec.structs import replace

from aegis.core.effects import CopyBlocks
from aegis.core.ids import MachineId, RequestId
from aegis.core.messages import (
    Adopt,
    Cancel,
    DropModel,
    FetchKv,
    ForgetPeer,
    GaveUp,
    KvFetched,
    KvReleased,
    ModelDropped,
    NeedSlabs,
    PeerForgotten,
)
from aegis.core.model import ModelSpec
from decode.core import DecodeCore
from tests.sim.driven import PEER, PEER_WORD, Driven, adopt, decode, make_job, sides
from tests.unit.decode.turns import IN, TWO_MODELS_FIT, WEIGHTS, A

ABROAD = MachineId("abroad")


def from_abroad(request: int, spec: ModelSpec = A, prompt: int = 20) -> Adopt:
    message = adopt(make_job(request, spec, prompt=prompt), spec, first_block=40)
    return replace(message, kv=replace(message.kv, machine=ABROAD))


def fetching(driven: Driven[DecodeCore], request: int = 1) -> tuple[Adopt, FetchKv]:
    message = from_abroad(request)
    (wanted,) = driven.said(FetchKv, driven.on(message) and driven.effects)
    return message, wanted


def nothing_held(driven: Driven[DecodeCore]) -> bool:
    return not driven.core.ledger.host.use() and not driven.core.ledger.device.use()


def test_it_is_fetched_before_it_has_a_turn_and_released_at_once() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    message, wanted = fetching(driven)
    assert wanted.kv == message.kv and wanted.block_bytes == A.manifest.kv.block_bytes
    assert sum(stop - start for start, stop in wanted.blocks) == 2
    assert not driven.loads and not driven.asked(CopyBlocks)
    driven.on(KvFetched(RequestId(1), 1))
    assert driven.said(KvReleased) == [KvReleased(RequestId(1), 1, message.kv)]
    (copy,) = driven.asked(CopyBlocks)
    assert sides(copy)[0] == wanted.blocks
    driven.complete(WEIGHTS)
    driven.complete(IN)
    (run,) = driven.runs()
    assert [row.job.request for row in run.rows] == [1] and driven.said(KvReleased) == []
    assert not driven.core.ledger.host.use(), "the host blocks are free once they have been read"


def test_its_model_stays_while_it_waits_for_host_slabs() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, slabs=None)
    driven.on(from_abroad(1))
    driven.on(DropModel(A.model))
    assert not driven.said(ModelDropped)
    driven.granted(0)
    driven.on(KvFetched(RequestId(1), 1))
    driven.complete(WEIGHTS)
    driven.complete(IN)
    (run,) = driven.runs()
    assert [row.job.request for row in run.rows] == [1]


def test_its_owner_may_be_lost_once_it_has_arrived() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    fetching(driven)
    driven.on(KvFetched(RequestId(1), 1))
    driven.on(ForgetPeer(PEER, (PEER_WORD,)))
    assert driven.said(PeerForgotten) == [PeerForgotten(PEER)]
    driven.complete(WEIGHTS)
    driven.complete(IN)
    assert driven.runs()


def test_an_owner_is_forgotten_when_nothing_is_read_from_it_any_more() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    fetching(driven)
    driven.on(ForgetPeer(PEER, (PEER_WORD,)))
    assert not driven.said(PeerForgotten)
    driven.on(KvFetched(RequestId(1), 1, "lost"))
    assert driven.said(PeerForgotten) == [PeerForgotten(PEER)] and not driven.said(GaveUp)
    assert nothing_held(driven) and driven.core.queued == 0


def test_what_does_not_come_is_prefilled_again() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    message, _ = fetching(driven)
    driven.on(KvFetched(RequestId(1), 1, "damaged"))
    assert driven.said(KvReleased) == [KvReleased(RequestId(1), 1, message.kv)]
    assert driven.said(GaveUp) == [GaveUp(RequestId(1), 1)] and nothing_held(driven)
    assert driven.core.counters.given_up == 1


def test_a_request_that_is_cancelled_meanwhile_keeps_its_blocks_until_nothing_writes_to_them() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    fetching(driven)
    driven.on(Cancel(RequestId(1), 1))
    assert not driven.said(KvReleased) and not nothing_held(driven)
    driven.on(KvFetched(RequestId(1), 1))
    assert driven.said(KvReleased) and nothing_held(driven) and not driven.core.queued


def test_it_waits_for_slabs_and_takes_all_it_needs_at_once() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, slabs=None)
    driven.on(from_abroad(1))
    assert driven.said(NeedSlabs) == [NeedSlabs(1)] and not driven.said(FetchKv)
    driven.granted(0)
    assert len(driven.said(FetchKv)) == 1


def test_one_that_waits_for_slabs_can_be_cancelled() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, slabs=None)
    message = from_abroad(1)
    driven.on(message)
    driven.on(Cancel(RequestId(1), 1))
    assert driven.said(KvReleased) == [KvReleased(RequestId(1), 1, message.kv)] and not driven.core.queued


def test_where_nobody_will_give_slabs_back_the_youngest_is_given_up() -> None:
    """Two machines whose slabs all hold KV for the other one would wait for each other for ever."""
    driven = decode(A, pages=TWO_MODELS_FIT, slabs=None)
    driven.on(from_abroad(1))
    driven.on(from_abroad(2))
    driven.granted(refused=True)
    assert driven.said(GaveUp) == [GaveUp(RequestId(2), 1), GaveUp(RequestId(1), 1)]
    assert [released.request for released in driven.said(KvReleased)] == [2, 1]
    assert driven.core.counters.given_up == 2
