"""Who gets a device's pages: refusals, order, whom they are taken from, limits, idle and lost instances."""

from __future__ import annotations

import pytest

from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, PageRun
from aegis.core.messages import GaveBack, GrantPages, NeedPages, TakeBack
from memory.arbiter import ArbiterEffect, InstanceUse, PageArbiter, Settled, WipeLost
from memory.pages import Runs, count_pages

A, B, C = (InstanceId(name) for name in "ABC")
PATIENCE_NS, IDLE_NS = 1000, 500
REFUSED = GrantPages((), refused=True)
EXCESSIVE = GrantPages((), refused=True, excessive=True)


def device(pages: int, *names: InstanceId, floor: int = 0, quantum: int = 1) -> PageArbiter:
    arbiter = PageArbiter(pages, floor=floor, idle_ns=IDLE_NS, patience_ns=PATIENCE_NS, quantum=quantum)
    for name in names:
        arbiter.join(name)
    return arbiter


def ask(arbiter: PageArbiter, name: InstanceId, pages: int, *, urgent: bool = False) -> list[ArbiterEffect]:
    effects = arbiter.ask(name, NeedPages(pages, urgent))
    arbiter.check()
    return effects


def hold(arbiter: PageArbiter, name: InstanceId, pages: int) -> Runs:
    (effect,) = ask(arbiter, name, pages)
    assert isinstance(effect, tuple) and isinstance(effect[1], GrantPages) and count_pages(effect[1].runs) == pages
    return effect[1].runs


def takings(effects: list[ArbiterEffect]) -> dict[InstanceId, int]:
    """From whom how much is taken firmly."""
    return {e[0]: e[1].pages for e in effects if isinstance(e, tuple) and firm(e[1])}


def firm(message: GrantPages | TakeBack) -> bool:
    return isinstance(message, TakeBack) and not message.gentle


def trims(effects: list[ArbiterEffect]) -> dict[InstanceId, int]:
    """Who is trimmed, down to how much."""
    return {e[0]: e[1].keep for e in effects if isinstance(e, tuple) and isinstance(e[1], TakeBack) and not firm(e[1])}


def grants(effects: list[ArbiterEffect]) -> list[tuple[InstanceId, int]]:
    """0 pages: a refusal."""
    found = [e for e in effects if isinstance(e, tuple)]
    return [(name, count_pages(message.runs)) for name, message in found if isinstance(message, GrantPages)]


def ticket(effects: list[ArbiterEffect], name: InstanceId) -> int:
    (found,) = [e[1].ticket for e in effects if isinstance(e, tuple) and isinstance(e[1], TakeBack) and e[0] == name]
    return found


def give(arbiter: PageArbiter, name: InstanceId, number: int, pages: int) -> list[ArbiterEffect]:
    """Answers a taking with the first pages that are held."""
    runs: list[PageRun] = []
    for run in arbiter._pool.runs_of(name):
        size = min(pages, run.pages)
        runs += [PageRun(run.start, run.start + size)] if size else []
        pages -= size
    assert not pages
    effects = arbiter.gave_back(name, GaveBack(number, tuple(runs)))
    arbiter.check()
    return effects


def refuse(arbiter: PageArbiter, name: InstanceId, number: int, spare: int = 0) -> list[ArbiterEffect]:
    effects = arbiter.gave_back(name, GaveBack(number, (), refused=True, spare=spare))
    arbiter.check()
    return effects


def idle(arbiter: PageArbiter, *names: InstanceId) -> None:
    for name in names:
        arbiter.seen(name, busy=False, now_ns=0)


# --- granting ---------------------------------------------------------------------------------------------------------


def test_a_wish_is_granted_whole_or_refused_at_once() -> None:
    arbiter = device(8, A, B)
    assert ask(arbiter, A, 6) == [(A, GrantPages((PageRun(0, 6),)))]
    assert ask(arbiter, B, 5) == [(B, REFUSED)] and arbiter.held(B) == 0
    assert arbiter.use() == {A: InstanceUse(6, 8, 0, False), B: InstanceUse(0, 8, 5, False)}


def test_two_want_the_last_page_one_gets_it_and_the_other_later() -> None:
    arbiter = device(3, A, B, C)
    hold(arbiter, C, 2)
    assert grants(ask(arbiter, A, 1, urgent=True)) == [(A, 1)]
    effects = ask(arbiter, B, 1, urgent=True)
    assert effects[-1] == (B, REFUSED), "a typed refusal, and it waits"
    assert takings(effects) == {C: 1}
    assert grants(give(arbiter, C, ticket(effects, C), 1)) == [(B, 1)]
    assert {name: use.held for name, use in arbiter.use().items()} == {A: 1, B: 1, C: 1}


def test_a_new_wish_replaces_the_last_one_and_none_withdraws_it() -> None:
    arbiter = device(4, A, B)
    hold(arbiter, A, 4)
    ask(arbiter, B, 3)
    ask(arbiter, B, 2)
    assert arbiter.use()[B].wish == 2
    assert ask(arbiter, B, 0) == [] and arbiter.use()[B].wish == 0


def test_who_wishes_alone_gets_more_at_once_as_far_as_its_limit_goes() -> None:
    arbiter = device(12, A, B, quantum=4)
    assert grants(ask(arbiter, A, 1)) == [(A, 4)]
    arbiter.set_limit(B, 3, command=1, patience_ns=1)
    assert grants(ask(arbiter, B, 1)) == [(B, 3)]
    assert grants(ask(arbiter, A, 5)) == [(A, 5)] and arbiter.free == 0


def test_urgent_wishes_are_served_in_order_of_asking_and_before_others() -> None:
    arbiter = device(6, A, B, C)
    hold(arbiter, A, 6)
    ask(arbiter, B, 3)
    first = ask(arbiter, C, 3, urgent=True)
    ask(arbiter, B, 1, urgent=True)
    effects = give(arbiter, A, ticket(first, A), 3)
    assert grants(effects) == [(C, 3)], "all of it is for who asked first"
    assert takings(effects) == {C: 1} or takings(effects) == {A: 1}
    assert arbiter.use()[B].wish == 1


def test_a_small_wish_does_not_overtake_the_urgent_one_that_waits_for_more() -> None:
    arbiter = device(6, A, B, C)
    hold(arbiter, A, 5)
    effects = ask(arbiter, B, 3, urgent=True)
    assert ask(arbiter, C, 1)[-1] == (C, REFUSED) and arbiter.free == 1
    assert ask(arbiter, C, 1, urgent=True)[-1] == (C, REFUSED) and arbiter.free == 1
    assert grants(give(arbiter, A, ticket(effects, A), 2)) == [(B, 3)]


def test_a_wish_that_changes_keeps_its_place() -> None:
    arbiter = device(6, A, B, C)
    hold(arbiter, A, 6)
    effects = ask(arbiter, B, 2, urgent=True)
    ask(arbiter, C, 2, urgent=True)
    ask(arbiter, B, 1, urgent=True)
    assert grants(give(arbiter, A, ticket(effects, A), 2))[0] == (B, 1)


def test_one_that_becomes_urgent_goes_behind_other_urgent_ones() -> None:
    arbiter = device(6, A, B, C)
    hold(arbiter, A, 6)
    ask(arbiter, B, 3)
    effects = ask(arbiter, C, 2, urgent=True)
    ask(arbiter, B, 3, urgent=True)
    assert grants(give(arbiter, A, ticket(effects, A), 2)) == [(C, 2)]


def test_one_that_is_urgent_no_more_makes_way() -> None:
    arbiter = device(6, A, B, C)
    hold(arbiter, A, 6)
    effects = ask(arbiter, B, 2, urgent=True)
    ask(arbiter, C, 2, urgent=True)
    ask(arbiter, B, 2)
    assert grants(give(arbiter, A, ticket(effects, A), 2)) == [(C, 2)]


# --- taking for an urgent wish ----------------------------------------------------------------------------------------


def test_an_urgent_wish_takes_from_idle_instances_first() -> None:
    arbiter = device(12, A, B, C)
    hold(arbiter, A, 8)
    hold(arbiter, B, 3)
    idle(arbiter, B)
    assert takings(ask(arbiter, C, 4, urgent=True)) == {B: 3}, "one page was free"


def test_then_from_those_above_an_equal_share() -> None:
    arbiter = device(12, A, B, C)
    hold(arbiter, A, 4)
    hold(arbiter, B, 8)
    assert takings(ask(arbiter, C, 4, urgent=True)) == {B: 4}


def test_then_from_anybody() -> None:
    arbiter = device(12, A, B, C)
    hold(arbiter, A, 4)
    hold(arbiter, B, 8)
    assert takings(ask(arbiter, C, 11, urgent=True)) == {A: 3, B: 8}


def test_nobody_is_asked_twice_for_what_is_on_its_way() -> None:
    arbiter = device(12, A, B, C)
    hold(arbiter, A, 12)
    first = ask(arbiter, B, 4, urgent=True)
    assert takings(first) == {A: 4}
    assert takings(ask(arbiter, B, 6, urgent=True)) == {}, "one taking at a time"
    assert takings(give(arbiter, A, ticket(first, A), 4)) == {A: 2}, "then what is still lacking"


def test_who_could_not_give_as_much_is_asked_for_what_it_had() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 12)
    effects = refuse(arbiter, A, ticket(ask(arbiter, B, 6, urgent=True), A), spare=2)
    assert takings(effects) == {A: 2}
    effects = give(arbiter, A, ticket(effects, A), 2)
    assert takings(effects) == {A: 4} and grants(effects) == []
    assert grants(give(arbiter, A, ticket(effects, A), 4)) == [(B, 6)]


def test_a_refused_taking_leaves_the_accounts_as_they_were() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 12)
    effects = ask(arbiter, B, 6, urgent=True)
    before = arbiter.use()
    assert takings(refuse(arbiter, A, ticket(effects, A))) == {A: 6}, "and asked again"
    assert arbiter.use() == before and arbiter.free == 0


# --- coaxing for a patient one ----------------------------------------------------------------------------------------


def test_a_patient_wish_coaxes_all_that_idle_instances_can_spare() -> None:
    arbiter = device(12, A, B, C, floor=1)
    hold(arbiter, A, 8)
    hold(arbiter, B, 4)
    idle(arbiter, B)
    effects = ask(arbiter, C, 6)
    assert (takings(effects), trims(effects)) == ({}, {B: 0}), "A works, and C would have more than its share"


def test_a_patient_wish_of_a_poor_instance_coaxes_those_above_an_equal_share() -> None:
    arbiter = device(12, A, B, C)
    hold(arbiter, A, 8)
    hold(arbiter, B, 4)
    effects = ask(arbiter, C, 4)
    assert (takings(effects), trims(effects)) == ({}, {A: 4})
    assert grants(give(arbiter, A, ticket(effects, A), 4)) == [(C, 4)]


def test_who_had_nothing_to_spare_is_not_coaxed_again_before_it_has_worked() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 12)
    effects = ask(arbiter, B, 6)
    assert trims(effects) == {A: 6}
    assert trims(give(arbiter, A, ticket(effects, A), 1)) == {}
    assert trims(ask(arbiter, B, 6)) == {}
    arbiter.seen(A, busy=True, now_ns=0)
    assert trims(ask(arbiter, B, 6)) == {A: 6}


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
    assert effects == [(A, TakeBack(ticket(effects, A), 3, 9))]
    arbiter.check()
    assert ask(arbiter, A, 1) == [(A, REFUSED)], "it holds from the start"
    assert give(arbiter, A, ticket(effects, A), 3)[0] == Settled(7, 3)
    assert arbiter.use()[A] == InstanceUse(5, 5, 1, False)


def test_a_limit_that_cannot_be_met_in_time_is_refused_and_the_old_one_back() -> None:
    arbiter = device(12, A, B)
    arbiter.set_limit(A, 9, command=1, patience_ns=9)
    hold(arbiter, A, 8)
    effects = arbiter.set_limit(A, 5, command=2, patience_ns=9)
    assert refuse(arbiter, A, ticket(effects, A), spare=2) == [Settled(2, 2, refused=True)], "so much could be had"
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
    effects = give(arbiter, A, ticket(first, A), 4)
    assert effects[0] == Settled(1, 4) and takings(effects) == {A: 2} and arbiter.use()[A].limit == 6
    assert refuse(arbiter, A, ticket(effects, A)) == [Settled(2, 0, refused=True), Settled(3, 0)]
    assert arbiter.use()[A].limit == 10


def test_an_urgent_wish_beyond_the_limit_is_told_so_and_holds_up_nobody() -> None:
    arbiter = device(12, A, B)
    arbiter.set_limit(A, 4, command=1, patience_ns=9)
    assert ask(arbiter, A, 5, urgent=True) == [(A, EXCESSIVE)]
    assert grants(ask(arbiter, B, 12, urgent=True)) == [(B, 12)]


def test_a_patient_wish_beyond_the_limit_just_waits() -> None:
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
        effects = give(arbiter, A, ticket(effects, A), held - 4)
    assert [e for e in effects if isinstance(e, tuple) and e[0] == A] == [(A, EXCESSIVE)]


def test_nothing_is_hopeless_while_pages_are_on_their_way_back() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 8)
    arbiter.set_limit(A, 8, command=1, patience_ns=9)
    trim = arbiter.trim(A, keep=0)
    assert ask(arbiter, A, 4, urgent=True) == [(A, REFUSED)]
    assert grants(give(arbiter, A, ticket(trim, A), 4)) == [(A, 4)]


# --- idle and lost ----------------------------------------------------------------------------------------------------


def test_an_idle_instance_is_trimmed_to_its_floor() -> None:
    arbiter = device(12, A, B, floor=2)
    hold(arbiter, A, 8)
    idle(arbiter, A)
    assert arbiter.tick(IDLE_NS - 1) == []
    effects = arbiter.tick(IDLE_NS)
    assert effects == [(A, TakeBack(ticket(effects, A), 8, PATIENCE_NS, gentle=True, keep=2))]
    assert arbiter.tick(9 * IDLE_NS) == [], "it has not answered yet"
    assert give(arbiter, A, ticket(effects, A), 6) == []
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
    give(arbiter, A, ticket(arbiter.tick(IDLE_NS), A), 1)
    assert arbiter.tick(2 * IDLE_NS - 1) == [] and trims(arbiter.tick(2 * IDLE_NS)) == {A: 0}


def test_a_trim_says_how_much_it_got_and_is_never_refused() -> None:
    arbiter = device(12, A)
    hold(arbiter, A, 8)
    first = arbiter.trim(A, keep=3, command=5)
    second = arbiter.trim(A, command=6)
    assert (trims(first), trims(second)) == ({A: 3}, {A: 0})
    assert give(arbiter, A, ticket(first, A), 5) == [Settled(5, 5)]
    assert give(arbiter, A, ticket(second, A), 0) == [Settled(6, 0)]


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
            arbiter._wishes[B] = NeedPages(4, urgent=True)
    with pytest.raises(LawBroken, match=law):
        arbiter.check()
