"""The holders of a device's pages: refusals, order, and the instances that have to give pages back."""

from __future__ import annotations

from aegis.core.ids import PageRun
from aegis.core.messages import GrantPages
from memory.page_arbiter import InstanceUse
from tests.unit.memory.accounts import (
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

# --- granting ---------------------------------------------------------------------------------------------------------


def test_a_request_is_granted_whole_or_refused_at_once() -> None:
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
    assert grants(give(arbiter, C, number_of(effects, C), 1)) == [(B, 1)]
    assert {name: use.held for name, use in arbiter.use().items()} == {A: 1, B: 1, C: 1}


def test_a_new_request_replaces_the_last_one_and_none_withdraws_it() -> None:
    arbiter = device(4, A, B)
    hold(arbiter, A, 4)
    ask(arbiter, B, 3)
    ask(arbiter, B, 2)
    assert arbiter.use()[B].requested == 2
    assert ask(arbiter, B, 0) == [] and arbiter.use()[B].requested == 0


def test_who_requestes_alone_gets_more_at_once_as_far_as_its_limit_goes() -> None:
    arbiter = device(12, A, B, quantum=4)
    assert grants(ask(arbiter, A, 1)) == [(A, 4)]
    arbiter.set_limit(B, 3, command=1, patience_ns=1)
    assert grants(ask(arbiter, B, 1)) == [(B, 3)]
    assert grants(ask(arbiter, A, 5)) == [(A, 5)] and arbiter.free == 0


def test_urgent_requestes_are_served_in_order_of_asking_and_before_others() -> None:
    arbiter = device(6, A, B, C)
    hold(arbiter, A, 6)
    ask(arbiter, B, 3)
    first = ask(arbiter, C, 3, urgent=True)
    ask(arbiter, B, 1, urgent=True)
    effects = give(arbiter, A, number_of(first, A), 3)
    assert grants(effects) == [(C, 3)], "all of it is for who asked first"
    assert takings(effects) == {C: 1} or takings(effects) == {A: 1}
    assert arbiter.use()[B].requested == 1


def test_a_small_request_does_not_overtake_the_urgent_one_that_waits_for_more() -> None:
    arbiter = device(6, A, B, C)
    hold(arbiter, A, 5)
    effects = ask(arbiter, B, 3, urgent=True)
    assert ask(arbiter, C, 1)[-1] == (C, REFUSED) and arbiter.free == 1
    assert ask(arbiter, C, 1, urgent=True)[-1] == (C, REFUSED) and arbiter.free == 1
    assert grants(give(arbiter, A, number_of(effects, A), 2)) == [(B, 3)]


def test_a_request_that_changes_keeps_its_place() -> None:
    arbiter = device(6, A, B, C)
    hold(arbiter, A, 6)
    effects = ask(arbiter, B, 2, urgent=True)
    ask(arbiter, C, 2, urgent=True)
    ask(arbiter, B, 1, urgent=True)
    assert grants(give(arbiter, A, number_of(effects, A), 2))[0] == (B, 1)


def test_one_that_becomes_urgent_goes_behind_other_urgent_ones() -> None:
    arbiter = device(6, A, B, C)
    hold(arbiter, A, 6)
    ask(arbiter, B, 3)
    effects = ask(arbiter, C, 2, urgent=True)
    ask(arbiter, B, 3, urgent=True)
    assert grants(give(arbiter, A, number_of(effects, A), 2)) == [(C, 2)]


def test_one_that_is_urgent_no_more_makes_way() -> None:
    arbiter = device(6, A, B, C)
    hold(arbiter, A, 6)
    effects = ask(arbiter, B, 2, urgent=True)
    ask(arbiter, C, 2, urgent=True)
    ask(arbiter, B, 2)
    assert grants(give(arbiter, A, number_of(effects, A), 2)) == [(C, 2)]


# --- taking for an urgent request -------------------------------------------------------------------------------------


def test_an_urgent_request_takes_from_idle_instances_first() -> None:
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
    assert takings(give(arbiter, A, number_of(first, A), 4)) == {A: 2}, "then what is still lacking"


def test_what_one_was_asked_for_is_not_asked_of_another() -> None:
    arbiter = device(12, A, B, C)
    hold(arbiter, A, 8)
    hold(arbiter, B, 4)
    assert takings(ask(arbiter, C, 3, urgent=True)) == {A: 3}
    assert takings(ask(arbiter, C, 4, urgent=True)) == {B: 1}, "only what is lacking besides"


def test_who_could_not_give_as_much_is_asked_for_what_it_had() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 12)
    effects = refuse(arbiter, A, number_of(ask(arbiter, B, 6, urgent=True), A), spare=2)
    assert takings(effects) == {A: 2}
    effects = give(arbiter, A, number_of(effects, A), 2)
    assert takings(effects) == {A: 4} and grants(effects) == []
    assert grants(give(arbiter, A, number_of(effects, A), 4)) == [(B, 6)]


def test_a_refused_taking_leaves_the_accounts_as_they_were() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 12)
    effects = ask(arbiter, B, 6, urgent=True)
    before = arbiter.use()
    assert takings(refuse(arbiter, A, number_of(effects, A))) == {A: 6}, "and asked again"
    assert arbiter.use() == before and arbiter.free == 0


# --- coaxing for a patient one ----------------------------------------------------------------------------------------


def test_a_patient_request_coaxes_all_that_idle_instances_can_spare() -> None:
    arbiter = device(12, A, B, C, floor=1)
    hold(arbiter, A, 8)
    hold(arbiter, B, 4)
    idle(arbiter, B)
    effects = ask(arbiter, C, 6)
    assert (takings(effects), trims(effects)) == ({}, {B: 0}), "A works, and C would have more than its share"


def test_a_patient_request_of_a_poor_instance_coaxes_those_above_an_equal_share() -> None:
    arbiter = device(12, A, B, C)
    hold(arbiter, A, 8)
    hold(arbiter, B, 4)
    effects = ask(arbiter, C, 4)
    assert (takings(effects), trims(effects)) == ({}, {A: 4})
    assert grants(give(arbiter, A, number_of(effects, A), 4)) == [(C, 4)]


def test_who_had_nothing_to_spare_is_not_coaxed_again_before_it_has_worked() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 12)
    effects = ask(arbiter, B, 6)
    assert trims(effects) == {A: 6}
    assert trims(give(arbiter, A, number_of(effects, A), 1)) == {}
    assert trims(ask(arbiter, B, 6)) == {}
    arbiter.seen(A, busy=True, now_ns=0)
    assert trims(ask(arbiter, B, 6)) == {A: 6}


def test_a_crowded_request_takes_what_others_need_above_an_equal_share() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 10)
    hold(arbiter, B, 2)
    effects = ask(arbiter, B, 3, crowded=True)
    assert (takings(effects), trims(effects)) == ({}, {A: 6}), "first what it does not need"
    effects = give(arbiter, A, number_of(effects, A), 1)
    assert (takings(effects), trims(effects)) == ({A: 2}, {})
    assert grants(give(arbiter, A, number_of(effects, A), 2)) == [(B, 3)]


def test_a_crowded_request_beyond_an_equal_share_takes_nothing() -> None:
    arbiter = device(12, A, B)
    hold(arbiter, A, 7)
    hold(arbiter, B, 5)
    for _ in range(2):
        effects = ask(arbiter, B, 2, crowded=True)
        assert (takings(effects), trims(effects)) == ({}, {})


def test_a_crowded_request_takes_no_more_than_it_lacks_from_all_together() -> None:
    arbiter = device(12, A, B, C)
    hold(arbiter, A, 6)
    hold(arbiter, B, 6)
    effects = ask(arbiter, C, 3, crowded=True)
    assert takings(give(arbiter, A, number_of(effects, A), 0)) == {A: 2}
    assert takings(give(arbiter, B, number_of(effects, B), 0)) == {B: 1}
