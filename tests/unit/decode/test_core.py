"""The decode core, scripted: a sequence's way, continuous batching, the three rules, endings."""

from __future__ import annotations

import pytest

from aegis.core.block_runs import first_blocks
from aegis.core.effects import (
    CopyBlocks,
    EndRun,
    Track,
    Untrack,
)
from aegis.core.events import StepFailed
from aegis.core.ids import RequestId
from aegis.core.messages import (
    Broken,
    Cancel,
    KvReleased,
    Shutdown,
)
from tests.sim.driven import PEER_WORD, adopt, decode, make_job, sides
from tests.unit.decode.turns import IN, OUT, TWO_MODELS_FIT, WEIGHTS, WIDE, A, running, settle, step, take, two_turns

# --- a sequence's way ------------------------------------------------------------------------------------------------


def test_a_sequence_goes_on_from_where_the_prefill_left_it() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    message = adopt(make_job(1, A, prompt=20), A, first_block=40)
    driven.on(message)
    assert driven.asked(Track) == [Track(message.job, (1,))] and driven.loads == [A.model]
    (copy,) = driven.asked(CopyBlocks)
    assert sides(copy)[0] == message.kv.blocks == ((40, 42),), "KV and weights come side by side"
    driven.complete(WEIGHTS)
    driven.complete(IN)
    assert driven.said(KvReleased) == [KvReleased(RequestId(1), 1, message.kv)]
    (run,) = driven.runs()
    (row,) = run.rows
    assert (row.job, row.index, row.token, row.start) == (message.job, 1, 1, 20)
    assert first_blocks(row.blocks, 2) == sides(copy)[1]
    driven.stepped(5)
    (row,) = driven.runs()[0].rows
    assert (row.index, row.token, row.start) == (2, 5, 21)


def test_rule_2_a_swap_in_waits_for_the_swap_out_of_the_peer() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    message = adopt(make_job(1, A), A, first_block=40)
    driven.on(message)
    driven.complete(WEIGHTS)
    (copy,) = driven.copies
    assert copy.after == message.kv.ready and copy.after.word == PEER_WORD


@pytest.mark.parametrize("token", [7, 2], ids=["stop", "length"])
def test_the_last_token_ends_a_sequence_and_frees_all_it_held(token: int) -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A, max_tokens=2)
    settle(driven)
    driven.stepped(token)
    assert driven.asked(Untrack) == [Untrack(RequestId(1))] and not driven.runs()
    assert not driven.core.ledger.device.use() and not driven.core.ledger.host.use()
    assert driven.core.queued == driven.core.running == 0


# --- continuous batching ---------------------------------------------------------------------------------------------


def test_new_ones_join_and_finished_ones_leave_between_steps() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A, max_tokens=3)
    settle(driven)
    take(driven, 2, A)
    assert step(driven) == [1]
    driven.complete(IN)
    assert step(driven) == [1, 2] or step(driven) == [2]
    while 1 in running(driven):
        step(driven)
    assert running(driven) == [2]


def test_rule_1_a_step_waits_for_its_own_kv_only() -> None:
    """Each sequence joins as soon as its own swap-in has passed."""
    driven = decode(A, pages=TWO_MODELS_FIT)
    for request in (1, 2, 3):
        take(driven, request, A)
    driven.complete(WEIGHTS)
    assert driven.under_way(IN) == 3 and not driven.runs()
    driven.complete(IN, 1)
    assert running(driven) == [1]
    driven.complete(IN, 1)
    assert step(driven) == [1, 2]
    driven.complete(IN, 1)
    assert step(driven) == [1, 2, 3]


def test_kv_is_released_to_its_owner_when_it_has_arrived_and_not_before() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    take(driven, 2, A)
    driven.complete(WEIGHTS)
    assert not driven.said(KvReleased, driven.effects)
    driven.complete(IN, 1)
    assert [message.request for message in driven.said(KvReleased)] == [1]


# --- cancellation ----------------------------------------------------------------------------------------------------


def test_cancelled_before_its_kv_was_asked_for() -> None:
    driven = two_turns(4)
    driven.on(Cancel(RequestId(2), 1))
    assert [message.request for message in driven.said(KvReleased)] == [2]
    assert driven.asked(Untrack) == [Untrack(RequestId(2))]


def test_cancelled_while_its_kv_arrives() -> None:
    """Rule 3: the blocks stay untouched, and the owner's are not released, until the copy has passed."""
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    driven.complete(WEIGHTS)
    driven.on(Cancel(RequestId(1), 1))
    assert not driven.said(KvReleased) and driven.core.ledger.device.use()[A.manifest.kv].moving == 1
    driven.complete(IN)
    assert [message.request for message in driven.said(KvReleased)] == [1]
    assert not driven.core.ledger.device.use()


def test_cancelled_in_the_middle_of_a_step() -> None:
    """The step still writes to its blocks: they are freed when it is over."""
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A, max_tokens=6)
    take(driven, 2, A, max_tokens=6)
    settle(driven)
    assert step(driven) == [1, 2]
    driven.on(Cancel(RequestId(1), 1))
    assert driven.last[-1] == EndRun() and driven.core.ledger.device.use()[A.manifest.kv].used == 2
    driven.stepped(3, 4)
    assert running(driven) == [2]
    assert driven.core.ledger.device.use()[A.manifest.kv].used == 1


def test_a_step_that_failed_ends_its_requests_and_frees_their_memory() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    take(driven, 2, A)
    settle(driven)
    assert step(driven) == [1, 2]
    driven.on(Cancel(RequestId(1), 1))
    driven.on(StepFailed("why"))
    assert driven.said(Broken) == [Broken(RequestId(2), 1, "why")]
    assert not driven.core.ledger.device.use() and running(driven) == []


def test_cancelled_while_it_waits_on_the_device() -> None:
    driven = two_turns(20)
    settle(driven)
    assert step(driven) == [2]
    used = driven.core.ledger.device.use()[WIDE.manifest.kv].used
    held = driven.core._by_request[RequestId(1)].held
    driven.on(Cancel(RequestId(1), 1))
    assert held and driven.core.ledger.device.use()[WIDE.manifest.kv].used == used - held


@pytest.mark.parametrize("copied", [False, True], ids=["during the copy", "after the copy"])
def test_cancelled_while_it_lies_in_the_host(copied: bool) -> None:
    driven = two_turns(4, slabs=4)
    driven.stepped(5)
    if copied:
        driven.complete(OUT)
    driven.on(Cancel(RequestId(1), 1))
    if not copied:
        assert driven.core.ledger.host.use()[WIDE.manifest.kv].moving == 1
        driven.complete(OUT)
    assert not driven.core.ledger.host.use()
    assert not driven.said(KvReleased)


def test_cancelled_while_its_saved_kv_comes_back() -> None:
    driven = two_turns(4, slabs=4)
    driven.stepped(5)
    settle(driven)
    driven.stepped(6)
    while not driven.under_way(IN):
        driven.complete(OUT if driven.under_way(OUT) else WEIGHTS)
    driven.on(Cancel(RequestId(1), 1))
    assert driven.core.ledger.host.use()[WIDE.manifest.kv].moving == 1
    settle(driven)
    driven.on(Cancel(RequestId(2), 1))
    settle(driven) if driven.under_way(IN) else driven.stepped(2)
    assert not driven.core.ledger.host.use() and not driven.core.ledger.device.use()


def test_a_cancellation_of_another_attempt_or_of_nobody_does_nothing() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT)
    take(driven, 1, A)
    settle(driven)
    driven.on(Cancel(RequestId(1), 2))
    driven.on(Cancel(RequestId(9), 1))
    assert step(driven) == [1]


def test_what_is_not_for_a_core_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="not for a decode instance"):
        decode(pages=8).on(Shutdown())
