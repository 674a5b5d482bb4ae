"""An instance's pages as they come and are taken back: the protocol step by step, and how pages are requested."""

from __future__ import annotations

import pytest

from aegis.core.effects import AcceptPages, RevokePages, Send, WipePages
from aegis.core.errors import LawBroken
from aegis.core.ids import PageRun
from aegis.core.messages import GaveBack, GrantPages, NeedPages
from memory.balloon import PageRequestState
from memory.pages import NoPages
from tests.unit.memory.held import EXCESSIVE, PATIENCE_NS, REFUSED, Held, pages_of, runs

# --- taking back ------------------------------------------------------------------------------------------------------


def test_retired_pages_are_not_handed_out() -> None:
    held = Held(6)
    held.use(4)
    assert held.take_back(1, 5) == [] and (held.balloon.retired, held.balloon.short) == (2, 3)
    assert held.pool.take("other", 1) == NoPages(1, 0)


def test_what_becomes_free_is_retired_until_all_is_there() -> None:
    held = Held(6)
    used = held.use(6)
    held.take_back(1, 3)
    for count, run in enumerate([PageRun(0, 1), PageRun(3, 4)], start=1):
        held.pool.give("m", (run,))
        held.balloon.settle(1)
        assert held.look() == [] and held.balloon.retired == count
    held.pool.give("m", (PageRun(5, 6),))
    held.balloon.settle(1)
    (wipe,) = held.look()
    assert isinstance(wipe, WipePages) and pages_of(wipe.runs) == {0, 3, 5} < pages_of(used)
    assert not held.balloon.owes


def test_clean_pages_need_no_wipe() -> None:
    assert Held(6).take_back(1, 4) == [RevokePages(runs((2, 6))), Send(GaveBack(1, runs((2, 6))))]


def test_written_pages_are_wiped_before_they_are_acknowledged() -> None:
    held = Held(6)
    held.pool.give("m", held.use(6))
    (wipe,) = held.take_back(1, 4)
    assert isinstance(wipe, WipePages)
    assert (held.balloon.held, held.balloon.leaving, held.balloon.owes) == (6, 4, False)
    assert held.wiped(wipe.event.value) == [RevokePages(wipe.runs), Send(GaveBack(1, wipe.runs))]
    assert (held.balloon.held, held.balloon.leaving) == (2, 0)


def test_clean_pages_wait_for_the_written_ones_they_leave_with() -> None:
    held = Held(4)
    held.pool.give("m", held.use(1))
    (wipe,) = held.take_back(1, 4)
    assert isinstance(wipe, WipePages) and wipe.runs == runs((0, 1))
    _, told = held.wiped(1)
    assert isinstance(told, Send) and isinstance(told.message, GaveBack) and pages_of(told.message.runs) == {0, 1, 2, 3}


def test_a_wipe_that_has_not_ended_acknowledges_nothing() -> None:
    held = Held(4)
    held.pool.give("m", held.use(4))
    held.trim(1, 1)
    held.trim(2, 1)
    assert [type(effect) for effect in held.wiped(1)] == [RevokePages, Send]
    assert held.balloon.leaving == 1
    assert held.wiped(2)[-1] == Send(GaveBack(2, runs((2, 3))))


def test_what_comes_too_late_leaves_everything_as_it_was() -> None:
    held = Held(6)
    held.pool.give("m", held.use(1))
    held.use(2)  # of those that nobody had
    clean, free = list(held.pool._clean), list(held.pool._free)
    held.take_back(7, 6)
    held.balloon.settle(PATIENCE_NS - 1)
    assert held.look() == [] and held.balloon.retired == 4
    held.balloon.settle(PATIENCE_NS)
    assert held.look() == [Send(GaveBack(7, (), refused=True, spare=4))]
    assert (list(held.pool._clean), list(held.pool._free)) == (clean, free)
    assert not held.balloon.owes and held.balloon.held == 6


def test_what_is_there_at_the_last_moment_is_given() -> None:
    held = Held(2)
    used = held.use(2)
    held.take_back(1, 2)
    held.pool.give("m", used)
    held.balloon.settle(PATIENCE_NS)
    assert [type(effect) for effect in held.look()] == [WipePages]


def test_waiting_alone_retires_nothing_more() -> None:
    """Who has not had its step yet keeps what it was granted; the answer comes in time all the same."""
    held = Held(4)
    held.take_back(1, 4, settle=False)
    held.balloon.expire(PATIENCE_NS - 1)
    assert held.look() == [] and held.pool.free == 4
    held.balloon.expire(PATIENCE_NS)
    assert held.look() == [Send(GaveBack(1, (), refused=True, spare=0))]


def test_what_runs_makes_way_when_a_quarter_of_the_time_is_over() -> None:
    held = Held(4)
    used = held.use(4)
    held.take_back(1, 2)
    assert not held.balloon.must_yield(PATIENCE_NS // 4 - 1) and held.balloon.must_yield(PATIENCE_NS // 4)
    held.pool.give("m", used)
    held.balloon.settle(1)
    assert not held.balloon.must_yield(PATIENCE_NS), "nothing is owed any more"


def test_one_taking_at_a_time_and_no_more_than_is_held() -> None:
    held = Held(4)
    held.use(4)
    with pytest.raises(AssertionError):
        held.take_back(1, 5)
    held.take_back(1, 4)
    with pytest.raises(AssertionError):
        held.take_back(2, 1)


@pytest.mark.parametrize(("pages", "keep", "given"), [(9, 0, 4), (3, 0, 3), (9, 4, 2), (9, 6, 0), (9, 9, 0), (0, 0, 0)])
def test_a_trim_takes_what_is_free_down_to_what_is_kept(pages: int, keep: int, given: int) -> None:
    held = Held(6)
    held.use(2)
    told = held.trim(1, pages, keep=keep)[-1]
    assert isinstance(told, Send) and isinstance(told.message, GaveBack)
    assert len(pages_of(told.message.runs)) == given and not told.message.refused
    assert held.balloon.held == 6 - given


def test_a_trim_leaves_what_is_owed() -> None:
    """Else what is owed could be more than is held."""
    held = Held(6)
    held.use(1)
    held.take_back(1, 4, settle=False)
    told = held.trim(2, 6)[-1]
    assert told == Send(GaveBack(2, runs((5, 6))))
    held.balloon.settle(1)
    assert not held.balloon.owes and held.balloon.held == 1


def test_two_trims_at_a_time_leave_what_is_to_be_kept() -> None:
    held = Held(8)
    held.pool.give("m", held.use(8))
    held.trim(1, 8, keep=4)
    assert held.trim(2, 8, keep=4) == [Send(GaveBack(2, ()))]
    held.wiped(1)
    assert held.balloon.held == held.balloon.staying == 4


def test_a_trim_keeps_none_of_what_is_owed() -> None:
    held = Held(8)
    held.take_back(1, 3, settle=False)
    assert held.trim(2, 8, keep=4) == [RevokePages(runs((7, 8))), Send(GaveBack(2, runs((7, 8))))]
    held.balloon.settle(1)
    assert held.balloon.held == held.balloon.staying == 4


# --- requests ---------------------------------------------------------------------------------------------------------


def asked(held: Held) -> list[NeedPages]:
    return [e.message for e in held.look() if isinstance(e, Send) and isinstance(e.message, NeedPages)]


def test_a_request_is_asked_once_and_an_answer_awaited() -> None:
    held = Held()
    held.balloon.want(3, urgent=False)
    held.balloon.want(5, urgent=False)
    held.balloon.want(5, urgent=True)
    assert asked(held) == [NeedPages(3, urgent=False)] and held.balloon.request_state is PageRequestState.ASKED


def test_a_refused_request_is_remembered_by_who_refused_it() -> None:
    held = Held()
    held.balloon.want(3, urgent=False)
    held.balloon.granted(REFUSED)
    held.balloon.want(3, urgent=False)
    held.balloon.want(4, urgent=False)
    assert asked(held) == [NeedPages(3, urgent=False)] and held.balloon.request_state is PageRequestState.REFUSED


def test_an_urgent_request_is_asked_again_only_where_it_changed() -> None:
    held = Held()
    for request_state, message in [(3, NeedPages(3, urgent=True)), (3, None), (4, NeedPages(4, urgent=True))]:
        held.balloon.want(request_state, urgent=True)
        assert asked(held) == ([message] if message else [])
        held.balloon.granted(REFUSED)
    assert held.balloon.stands_still and not held.balloon.hopeless


def test_a_refused_request_is_asked_again_when_it_becomes_crowded() -> None:
    held = Held()
    held.balloon.want(3, urgent=False)
    held.balloon.granted(REFUSED)
    for _ in range(2):
        held.balloon.want(1, urgent=False, crowded=True)
        held.balloon.granted(REFUSED)
    assert asked(held) == [NeedPages(3, urgent=False), NeedPages(1, urgent=False, crowded=True)]
    held.balloon.want(2, urgent=True)
    held.balloon.granted(REFUSED)
    held.balloon.want(1, urgent=False, crowded=True)
    assert asked(held) == [NeedPages(2, urgent=True)], "that weighs more"


def test_who_is_content_is_urgent_no_more() -> None:
    held = Held()
    held.balloon.want(3, urgent=True)
    held.balloon.content()
    assert asked(held) == [NeedPages(3, urgent=True)], "the answer comes first"
    held.balloon.granted(REFUSED)
    held.balloon.content()
    held.balloon.content()
    assert asked(held) == [NeedPages(3, urgent=False)] and not held.balloon.stands_still


def test_what_the_limit_forbids_is_hopeless_until_it_is_granted_or_wanted_no_more() -> None:
    held = Held()
    held.balloon.want(3, urgent=True)
    held.balloon.granted(EXCESSIVE)
    assert held.balloon.hopeless and not held.balloon.stands_still
    held.balloon.granted(GrantPages(runs((0, 3))))
    assert not held.balloon.hopeless and held.balloon.held == 3


def test_only_an_urgent_request_is_hopeless() -> None:
    held = Held()
    held.balloon.want(3, urgent=False)
    held.balloon.granted(EXCESSIVE)
    assert not held.balloon.hopeless and not held.balloon.stands_still


@pytest.mark.parametrize("answer", [REFUSED, EXCESSIVE])
def test_who_is_trimmed_withdraws_its_request(answer: GrantPages) -> None:
    held = Held(2)
    held.balloon.want(3, urgent=False)
    held.balloon.granted(answer)
    held.look()
    assert (
        held.trim(1, 2)[0] == Send(NeedPages(0, urgent=False)) and held.balloon.request_state is PageRequestState.NONE
    )
    held.balloon.want(1, urgent=False)
    assert asked(held) == [NeedPages(1, urgent=False)]


@pytest.mark.parametrize("answer", [REFUSED, EXCESSIVE])
def test_an_answer_to_a_request_that_was_withdrawn_keeps_nobody_from_asking_again(answer: GrantPages) -> None:
    held = Held(2)
    held.balloon.want(3, urgent=False)
    held.balloon.granted(REFUSED)
    held.trim(1, 2)
    held.balloon.granted(answer)
    held.balloon.want(1, urgent=False)
    assert asked(held) == [NeedPages(1, urgent=False)]


def test_pages_that_come_after_all_are_taken_in() -> None:
    """They were granted while the request was being withdrawn."""
    held = Held(2)
    held.balloon.want(3, urgent=False)
    held.balloon.granted(REFUSED)
    held.trim(1, 2)
    held.balloon.granted(GrantPages(runs((2, 5))))
    assert held.look() == [AcceptPages(runs((2, 5)))] and held.balloon.held == 3


def test_check_finds_what_is_broken() -> None:
    held = Held(4)
    held.pool.deflate(1)
    with pytest.raises(LawBroken, match="V1"):
        held.balloon.check()
