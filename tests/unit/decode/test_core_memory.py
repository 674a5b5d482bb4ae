"""The decode core, scripted: memory that lacks, on the device and in the host."""

from __future__ import annotations

from aegis.core.effects import (
    CopyBlocks,
    UnmapWeights,
    Untrack,
)
from aegis.core.ids import RequestId
from aegis.core.messages import (
    Cancel,
    GaveUp,
    NeedSlabs,
    ReturnSlabs,
)
from aegis.sim.faults.fake_models import PAGE
from decode.sequences import Where
from tests.sim.driven import decode, sides
from tests.unit.decode.turns import (
    IN,
    OUT,
    TWO_MODELS_FIT,
    WEIGHTS,
    WIDE,
    WIDE_2,
    A,
    running,
    settle,
    short_turns,
    step,
    take,
    two_turns,
)


def test_kv_stays_on_the_device_while_there_is_room() -> None:
    driven = two_turns(20)
    settle(driven)
    for _ in range(6):
        step(driven)
    assert driven.core.counters.preemptions == 6
    assert driven.core.counters.swap_out_bytes == 0 and driven.under_way(IN) == 0


def test_kv_is_swapped_out_when_there_is_no_room_and_comes_back() -> None:
    driven = two_turns(4)
    driven.stepped(5)
    (out,) = driven.asked(CopyBlocks)
    assert out.stream is OUT and driven.core.counters.swap_out_bytes == PAGE
    settle(driven)
    assert running(driven) == [2]
    driven.stepped(6)
    settle(driven)
    assert running(driven) == [1]
    back = driven.copies[-1]
    assert sides(out)[1] == sides(back)[0], "from where it was put"
    assert back.after == out.event, "rule 2"
    (row,) = driven.runs()[0].rows
    assert (row.token, row.start) == (5, 12), "exactly where it stopped"


def test_host_blocks_are_free_again_when_the_kv_is_back() -> None:
    driven = two_turns(4)
    held = []
    for _ in range(4):
        driven.stepped(5)
        settle(driven)
        held.append([driven.core.ledger.host.use()[s.manifest.kv].used for s in (WIDE,)])
    assert held == [[1]] * 4, "always that of the one that does not run"


def test_idle_weights_leave_before_kv_does() -> None:
    driven = two_turns(3 + 3 + 2)
    settle(driven)
    assert set(driven.core.ledger.weights.resident()) == {WIDE.model, WIDE_2.model}
    driven.on(Cancel(RequestId(2), 1))
    for _ in range(40):
        step(driven)
    assert driven.asked(UnmapWeights, driven.effects) == [UnmapWeights(WIDE_2.model)]
    assert driven.core.counters.swap_out_bytes == 0


def test_the_batch_whose_turn_is_furthest_gives_its_kv_away_first() -> None:
    """The order of turns is known, so the best choice is: the one that has just run, not the one longest unused."""
    driven = short_turns(WIDE, WIDE_2, A, pages=3 + 5)
    take(driven, 1, WIDE, prompt=20)
    settle(driven)
    take(driven, 2, WIDE_2, prompt=20)
    take(driven, 3, A, prompt=4 * 2 * 16)
    assert step(driven) == [1]
    for expected, elsewhere in ((2, {3}), (3, {2}), (1, {2}), (2, {1})):
        driven.stepped(2)
        settle(driven)
        assert running(driven) == [expected]
        sequences = driven.core._by_request.values()
        assert {s.job.request for s in sequences if s.where is Where.HOST} == elsewhere


def test_the_youngest_of_the_only_batch_makes_room_for_the_others() -> None:
    driven = decode(WIDE, pages=3 + 3, slabs=4)
    for request in (1, 2):
        take(driven, request, WIDE, prompt=15)
    settle(driven)
    while 2 in running(driven):
        step(driven)
    assert running(driven) == [1]
    for _ in range(20):
        step(driven)
        if driven.under_way(OUT):
            settle(driven)
    assert 2 not in running(driven)


def test_without_host_slabs_kv_is_given_up_and_the_request_prefilled_again() -> None:
    driven = two_turns(4, slabs=None)
    driven.stepped(5)
    assert driven.said(NeedSlabs) == [NeedSlabs(1)]
    assert not driven.said(GaveUp) and not driven.runs()
    driven.granted(refused=True)
    assert driven.said(GaveUp) == [GaveUp(RequestId(1), 1)]
    assert driven.asked(Untrack) == [Untrack(RequestId(1))]
    assert driven.core.counters.given_up == 1 and driven.under_way(WEIGHTS) == 1
    settle(driven)
    assert running(driven) == [2]


def test_slabs_are_asked_for_once() -> None:
    driven = two_turns(4, slabs=None)
    driven.stepped(5)
    take(driven, 3, WIDE_2)
    assert not driven.said(NeedSlabs)
    driven.granted(1)
    assert driven.under_way(OUT) == 1 and not driven.said(ReturnSlabs)


def test_slabs_that_are_not_needed_go_back_but_for_one() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, slabs=None)
    driven.granted(1, 2, 3)
    assert [len(message.slabs) for message in driven.said(ReturnSlabs)] == [2]


def test_a_refused_instance_keeps_no_slabs_from_others() -> None:
    """What it requested stays remembered by the node; what lies idle here meanwhile goes back."""
    driven = two_turns(4, slabs=None)
    driven.stepped(5)
    driven.granted(refused=True)
    driven.granted(1, 2, 3)
    assert [len(message.slabs) for message in driven.said(ReturnSlabs)] == [2]
