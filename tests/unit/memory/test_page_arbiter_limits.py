"""Limits on a device's accounts: limits that move, idle and lost instances; and the laws."""

from __future__ import annotations

import pytest

from aegis.core.errors import LawBroken
from aegis.core.ids import PageRun
from aegis.core.messages import GrantPages, NeedPages, TakeBack
from memory.page_arbiter import InstanceUse, PageArbiter, Settled, WipeLost
from tests.unit.memory.accounts import (
    EXCESSIVE,
    IDLE_NS,
    PATIENCE_NS,
    REFUSED,
    A,
    B,
    C,
    ask,
    device,
    give,
    grants,
    hold,
    idle,
    number_of,
    refuse,
    takings,
    trims,
)

# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_limit_above_what_is_held_takes_nothing_and_holds_from_now_on() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 4)
    assert arbiter.set_limit(A, 5, command=7, patience_ns=9) == [Settled(7, 0)]
    assert ask(arbiter, A, 2) == [(A, REFUSED)] and arbiter.use()[A].limit == 5
    assert grants(ask(arbiter, A, 1)) == [(A, 1)]


def test_a_limit_below_what_is_held_takes_back_and_is_settled_when_it_is_there() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 8)
    effects = arbiter.set_limit(A, 5, command=7, patience_ns=9)
    assert effects == [(A, TakeBack(number_of(effects, A), 3, 9))]
    arbiter.check()
    assert ask(arbiter, A, 1) == [(A, REFUSED)], "it holds from the start"
    assert give(arbiter, A, number_of(effects, A), 3)[0] == Settled(7, 3)
    assert arbiter.use()[A] == InstanceUse(5, 5, 1, False)


def test_a_limit_that_cannot_be_met_in_time_is_refused_and_the_old_one_back() -> None:
    arbiter = device(12, A, B)
    arbiter.set_limit(A, 9, command=1, patience_ns=9)
    hold(arbiter, A, 8)
    effects = arbiter.set_limit(A, 5, command=2, patience_ns=9)
    assert refuse(arbiter, A, number_of(effects, A), spare=2) == [Settled(2, 2, refused=True)], "so much could be had"
    assert arbiter.use()[A] == InstanceUse(8, 9, 0, False)
    assert grants(ask(arbiter, A, 1)) == [(A, 1)]


def test_a_raised_limit_grants_what_waited_for_it() -> None:
    arbiter = device(12, A, B)
    arbiter.set_limit(A, 4, command=1, patience_ns=9)
    ask(arbiter, A, 6)
    assert arbiter.set_limit(A, 8, command=2, patience_ns=9) == [Settled(2, 0), (A, GrantPages((PageRun(0, 6),)))]


def test_limits_are_settled_one_after_the_other() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 12)
    first = arbiter.set_limit(A, 8, command=1, patience_ns=9)
    assert arbiter.set_limit(A, 6, command=2, patience_ns=8) == []
    assert arbiter.set_limit(A, 10, command=3, patience_ns=7) == []
    effects = give(arbiter, A, number_of(first, A), 4)
    assert effects[0] == Settled(1, 4) and takings(effects) == {A: 2} and arbiter.use()[A].limit == 6
    assert refuse(arbiter, A, number_of(effects, A)) == [Settled(2, 0, refused=True), Settled(3, 0)]
    assert arbiter.use()[A].limit == 10


def test_a_limit_waits_for_a_trim_under_way() -> None:
    """What the trim gives need not be taken."""
    arbiter = device(12, A)
    hold(arbiter, A, 8)
    trim = arbiter.trim(A, keep=4)
    assert arbiter.set_limit(A, 5, command=1, patience_ns=9) == []
    assert give(arbiter, A, number_of(trim, A), 4) == [Settled(1, 0)] and arbiter.use()[A].limit == 5


def test_an_urgent_request_beyond_the_limit_is_told_so_and_holds_up_nobody() -> None:
    arbiter = device(12, A, B)
    arbiter.set_limit(A, 4, command=1, patience_ns=9)
    assert ask(arbiter, A, 5, urgent=True) == [(A, EXCESSIVE)]
    assert grants(ask(arbiter, B, 12, urgent=True)) == [(B, 12)]


def test_a_patient_request_beyond_the_limit_just_waits() -> None:
    arbiter = device(12, A, B)
    arbiter.set_limit(A, 4, command=1, patience_ns=9)
    assert ask(arbiter, A, 5) == [(A, REFUSED)]


@pytest.mark.parametrize("held", [0, 6], ids=["nothing to take", "with something to take"])
def test_who_waits_urgently_is_told_when_a_limit_makes_that_hopeless(held: int) -> None:
    arbiter = device(12, A, B)
    hold(arbiter, B, 12 - held)
    if held:
        hold(arbiter, A, held)
    ask(arbiter, A, 5, urgent=True)
    effects = arbiter.set_limit(A, 4, command=1, patience_ns=9)
    if held:
        assert grants(effects) == [], "what is being taken may make room"
        effects = give(arbiter, A, number_of(effects, A), held - 4)
    assert [e for e in effects if isinstance(e, tuple) and e[0] == A] == [(A, EXCESSIVE)]


def test_nothing_is_hopeless_while_pages_are_on_their_way_back() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 8)
    arbiter.set_limit(A, 8, command=1, patience_ns=9)
    trim = arbiter.trim(A, keep=0)
    assert ask(arbiter, A, 4, urgent=True) == [(A, REFUSED)]
    assert grants(give(arbiter, A, number_of(trim, A), 4)) == [(A, 4)]


# --- idle and lost ----------------------------------------------------------------------------------------------------


def test_an_idle_instance_is_trimmed_to_its_floor() -> None:
    arbiter = device(12, A, B, floor=2)
    hold(arbiter, A, 8)
    idle(arbiter, A)
    assert arbiter.tick(IDLE_NS - 1) == []
    effects = arbiter.tick(IDLE_NS)
    assert effects == [(A, TakeBack(number_of(effects, A), 8, PATIENCE_NS, gentle=True, keep=2))]
    assert arbiter.tick(9 * IDLE_NS) == [], "it has not answered yet"
    assert give(arbiter, A, number_of(effects, A), 6) == []
    assert arbiter.tick(99 * IDLE_NS) == [], "it is at its floor"


def test_an_instance_that_worked_meanwhile_is_not_idle() -> None:
    arbiter = device(12, A)
    hold(arbiter, A, 8)
    idle(arbiter, A)
    arbiter.seen(A, busy=True, now_ns=IDLE_NS - 1)
    assert arbiter.tick(IDLE_NS) == []
    arbiter.seen(A, busy=False, now_ns=IDLE_NS)
    assert arbiter.tick(2 * IDLE_NS - 1) == [] and arbiter.tick(2 * IDLE_NS)


def test_an_idle_one_that_kept_something_is_asked_again_after_a_while() -> None:
    arbiter = device(12, A)
    hold(arbiter, A, 8)
    idle(arbiter, A)
    give(arbiter, A, number_of(arbiter.tick(IDLE_NS), A), 1)
    assert arbiter.tick(2 * IDLE_NS - 1) == [] and trims(arbiter.tick(2 * IDLE_NS)) == {A: 0}


def test_a_trim_says_how_much_it_got_and_is_never_refused() -> None:
    arbiter = device(12, A)
    hold(arbiter, A, 8)
    first = arbiter.trim(A, keep=3, command=5)
    second = arbiter.trim(A, command=6)
    assert (trims(first), trims(second)) == ({A: 3}, {A: 0})
    assert give(arbiter, A, number_of(first, A), 5) == [Settled(5, 5)]
    assert give(arbiter, A, number_of(second, A), 0) == [Settled(6, 0)]


def test_a_lost_instances_pages_are_wiped_before_anybody_gets_them() -> None:
    arbiter = device(8, A, B)
    held = hold(arbiter, A, 6)
    ask(arbiter, B, 5, urgent=True)
    (wipe,) = arbiter.lost(A)
    assert isinstance(wipe, WipeLost) and wipe.runs == held
    arbiter.check()
    assert arbiter.free == 2 and arbiter.held(B) == 0
    arbiter.join(A)
    assert arbiter.held(A) == 0, "its next process starts with nothing"
    assert grants(arbiter.wiped(wipe.key)) == [(B, 5)]
    arbiter.check()


def test_an_instance_may_be_lost_again_while_its_pages_are_wiped() -> None:
    arbiter = device(8, A)
    hold(arbiter, A, 3)
    (first,) = arbiter.lost(A)
    arbiter.join(A)
    hold(arbiter, A, 3)
    (second,) = arbiter.lost(A)
    assert isinstance(first, WipeLost) and isinstance(second, WipeLost) and first.key != second.key
    arbiter.wiped(second.key)
    arbiter.wiped(first.key)
    arbiter.check()
    assert arbiter.free == 8


def test_what_was_asked_of_a_lost_instance_is_refused() -> None:
    arbiter = device(8, A, B)
    hold(arbiter, A, 6)
    arbiter.set_limit(A, 3, command=1, patience_ns=9)
    arbiter.set_limit(A, 2, command=2, patience_ns=9)
    arbiter.trim(A, command=3)
    arbiter.trim(A)
    settled = [effect for effect in arbiter.lost(A) if isinstance(effect, Settled)]
    assert settled == [Settled(command, 0, refused=True) for command in (1, 2, 3)]
    arbiter.join(A)
    assert arbiter.use()[A] == InstanceUse(0, 8, 0, False)


def test_a_lost_instance_comes_back_with_the_limit_it_had() -> None:
    arbiter = PageArbiter(12, idle_ns=1, patience_ns=1)
    arbiter.join(A)
    arbiter.set_limit(A, 5, command=1, patience_ns=1)
    arbiter.lost(A)
    arbiter.join(A)
    assert arbiter.use()[A].limit == 5


def test_who_waits_goes_on_when_whom_it_waited_for_is_lost() -> None:
    arbiter = device(8, A, B, C)
    hold(arbiter, A, 4)
    hold(arbiter, C, 4)
    assert takings(ask(arbiter, B, 2, urgent=True)) == {A: 2}
    assert takings(arbiter.lost(A)) == {C: 2}


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["A1", "A2", "A3"])
def test_check_finds_what_is_broken(law: str) -> None:
    arbiter = device(8, A, B)
    hold(arbiter, A, 4)
    match law:
        case "A1":
            arbiter._pool.deflate(1)
        case "A2":
            arbiter._members[A].limit = 3
        case "A3":
            arbiter._requests[B] = NeedPages(4, urgent=True)
    with pytest.raises(LawBroken, match=law):
        arbiter.check()
