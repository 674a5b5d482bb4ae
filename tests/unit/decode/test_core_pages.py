"""The decode core, scripted: pages asked of the device, pages given back to it, prefetches given up for them."""

from __future__ import annotations

from aegis.core.effects import AbandonLoad, LoadWeights, RevokePages, UnmapWeights
from aegis.core.events import Tick
from aegis.core.ids import PageRun, RequestId
from aegis.core.messages import Broken, Cancel, GaveBack, GaveUp, GrantPages, NeedPages, NeedSlabs, TakeBack
from aegis.core.model import ModelSpec
from aegis.sim.faults.fake_models import PAGE, make_spec
from decode.core import DecodeCore
from memory.pages import count_pages
from tests.sim.driven import Driven
from tests.unit.decode.turns import (
    IN,
    OUT,
    PREFETCH,
    SCRUB,
    WEIGHTS,
    WIDE,
    WIDE_2,
    A,
    B,
    lent,
    running,
    settle,
    step,
    take,
    two_turns,
)

SMALL = make_spec(7, image_pages=1, block_bytes=PAGE)
PATIENCE_NS = 40_000_000
REFUSED = GrantPages((), refused=True)
EXCESSIVE = GrantPages((), refused=True, excessive=True)


def page_requests(driven: Driven[DecodeCore]) -> list[NeedPages]:
    return driven.said(NeedPages)


def stands_still(*specs: ModelSpec, pages: int, requests: int = 1) -> Driven[DecodeCore]:
    """The first model's requests wait for what others have to give back."""
    driven = lent(*specs, pages=pages)
    for request in range(1, requests + 1):
        take(driven, request, specs[0])
    driven.on(REFUSED)
    (page_request,) = page_requests(driven)
    assert page_request.urgent
    driven.on(REFUSED)
    return driven


def gave_back(driven: Driven[DecodeCore]) -> list[tuple[int, int, bool]]:
    """Numbers, pages, and whether it was refused."""
    return [(m.number, count_pages(m.runs), m.refused) for m in driven.said(GaveBack)]


# --- asking -----------------------------------------------------------------------------------------------------------


def one_idle_model(pages: int) -> Driven[DecodeCore]:
    """WIDE lies there unused, and WIDE_2 is needed."""
    driven = lent(WIDE, WIDE_2, pages=pages)
    take(driven, 1, WIDE, max_tokens=2)
    settle(driven)
    driven.stepped(2)
    take(driven, 2, WIDE_2)
    return driven


def test_the_device_is_asked_before_anything_is_evicted() -> None:
    driven = one_idle_model(4)
    assert page_requests(driven) == [NeedPages(2, urgent=False)]
    assert not driven.asked(UnmapWeights) and driven.loads == [WIDE.model]


def test_what_it_grants_saves_an_eviction() -> None:
    driven = one_idle_model(4)
    driven.on(GrantPages((PageRun(4, 8),)))
    settle(driven)
    assert running(driven) == [2] and not driven.asked(UnmapWeights, driven.effects)


def test_once_it_has_refused_what_is_not_needed_is_evicted() -> None:
    driven = one_idle_model(4)
    driven.on(REFUSED)
    assert driven.asked(UnmapWeights) == [UnmapWeights(WIDE.model)] and driven.loads[-1] == WIDE_2.model
    settle(driven)
    assert running(driven) == [2] and not page_requests(driven)


def test_kv_is_put_away_only_once_the_device_has_refused() -> None:
    driven = lent(WIDE, WIDE_2, pages=4)
    take(driven, 1, WIDE)
    settle(driven)
    take(driven, 2, WIDE_2)
    turn = driven.core._work.turn
    assert turn is not None and step(driven) == [1]
    turn.quota_ns = 0
    assert step(driven) == [1], "a new round knows of both"
    turn = driven.core._work.turn
    assert turn is not None
    turn.quota_ns = 0
    assert step(driven) == [] and not driven.under_way(OUT)
    driven.on(REFUSED)
    driven.on(REFUSED)  # for the turn as for the prefetch before it
    assert driven.under_way(OUT)


def test_pages_are_wanted_urgently_when_nothing_is_left_to_put_away() -> None:
    """All that is lacking at once: weights and the first block."""
    driven = lent(WIDE, pages=2)
    take(driven, 1, WIDE)
    assert page_requests(driven) == [NeedPages(1, urgent=False)]
    driven.on(REFUSED)
    assert page_requests(driven) == [NeedPages(2, urgent=True)]
    driven.on(REFUSED)
    assert not page_requests(driven) and not driven.loads
    driven.on(GrantPages((PageRun(2, 4),)))
    settle(driven)
    assert running(driven) == [1] and not driven.said(NeedPages)


def test_who_is_content_lets_others_keep_what_they_have() -> None:
    driven = lent(WIDE, SMALL, pages=3)
    take(driven, 1, WIDE)
    driven.complete(WEIGHTS)
    driven.on(REFUSED)
    driven.on(REFUSED)
    assert driven.core.ledger.balloon.stands_still
    driven.on(Cancel(RequestId(1), 1))
    driven.on(REFUSED)
    take(driven, 2, SMALL)
    settle(driven)
    assert running(driven) == [2]
    assert [w.urgent for w in driven.said(NeedPages, driven.effects)] == [False, True, False]


def test_what_a_limit_forbids_ends_the_youngest_with_a_clear_reason() -> None:
    driven = stands_still(WIDE, pages=2, requests=2)
    driven.on(EXCESSIVE)
    (broken,) = driven.said(Broken)
    assert broken.request == 2 and "memory limit of its instance" in broken.reason
    assert page_requests(driven) == [NeedPages(2, urgent=False)], "others need give nothing"
    driven.on(REFUSED)
    assert page_requests(driven) == [NeedPages(2, urgent=True)], "the elder one still tries"
    driven.on(EXCESSIVE)
    assert [m.request for m in driven.said(Broken)] == [1] and driven.core.queued == 0


def test_nobody_is_ended_while_kv_that_arrives_can_still_be_put_away() -> None:
    """Two sequences arrive; what the second takes is had back as soon as it is there."""
    large = make_spec(6, image_pages=5, block_bytes=PAGE)
    driven = lent(SMALL, large, pages=13)
    take(driven, 1, SMALL, max_tokens=6)
    settle(driven)
    take(driven, 2, large)
    take(driven, 3, large)
    driven.complete(PREFETCH)
    assert driven.under_way(IN) == 2 and running(driven) == []
    driven.on(TakeBack(1, 13 - 4, PATIENCE_NS))
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 9, False)], "of the next turn the weights are gone, its KV still arrives"
    driven.on(Cancel(RequestId(1), 1))
    driven.stepped(2)
    driven.on(REFUSED)
    assert not any(page_request.urgent for page_request in page_requests(driven))
    driven.complete(IN)
    assert driven.under_way(OUT) and not driven.said(Broken, driven.effects)


# --- giving back ------------------------------------------------------------------------------------------------------


def test_what_is_idle_is_given_without_disturbing_anybody() -> None:
    driven = two_turns(3 + 3 + 2)
    settle(driven)
    driven.on(Cancel(RequestId(2), 1))
    driven.on(TakeBack(1, 4, PATIENCE_NS))
    assert driven.asked(UnmapWeights) == [UnmapWeights(WIDE_2.model)] and step(driven) == [1]
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 4, False)]
    assert [type(effect) for effect in driven.last].index(RevokePages) == 0


def test_a_turn_that_has_had_a_step_yields_when_its_time_is_over() -> None:
    driven = lent(WIDE, pages=5)
    take(driven, 1, WIDE)
    settle(driven)
    driven.on(TakeBack(1, 3, PATIENCE_NS))
    assert step(driven) == [1], "there is time"
    driven.stepped(2, after_ns=PATIENCE_NS // 4)
    assert running(driven) == [] and driven.asked(UnmapWeights) == [UnmapWeights(WIDE.model)]
    assert driven.under_way(OUT) and driven.core.counters.preemptions == 1
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 3, False)]
    driven.complete(OUT)
    driven.on(GrantPages((PageRun(10, 13),)))
    settle(driven)
    assert running(driven) == [1], "it goes on where it was"


def test_a_turn_that_has_had_no_step_keeps_what_it_was_granted() -> None:
    """Else instances would take from each other without any of them making a token."""
    driven = lent(WIDE, pages=4)
    take(driven, 1, WIDE)
    driven.on(TakeBack(1, 4, PATIENCE_NS))
    driven.on(Tick(), after_ns=PATIENCE_NS // 2)
    driven.complete(WEIGHTS)
    driven.complete(IN)
    assert running(driven) == [1] and not driven.said(GaveBack, driven.effects)
    driven.stepped(2)
    assert running(driven) == [] and driven.asked(UnmapWeights)
    driven.complete(OUT)
    driven.on(REFUSED)
    driven.on(REFUSED)
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 4, False)]


def test_what_cannot_be_had_in_time_is_refused_and_nothing_given() -> None:
    driven = lent(WIDE, pages=5)
    take(driven, 1, WIDE)
    driven.on(TakeBack(1, 5, PATIENCE_NS))
    driven.on(Tick(), after_ns=PATIENCE_NS)
    assert driven.said(GaveBack) == [GaveBack(1, (), refused=True, spare=0)]
    settle(driven)
    assert running(driven) == [1] and driven.core.ledger.balloon.held == 5


def test_what_was_retired_before_the_deadline_is_used_again_after_it() -> None:
    driven = lent(WIDE, pages=5)
    take(driven, 1, WIDE, prompt=15)
    settle(driven)
    driven.on(TakeBack(1, 5, PATIENCE_NS))
    assert driven.core.ledger.pool.free == 0
    driven.on(Tick(), after_ns=PATIENCE_NS)
    assert driven.said(GaveBack) == [GaveBack(1, (), refused=True, spare=1)]
    assert step(driven) == [1] and step(driven) == [1] and not page_requests(driven)


def test_who_stands_still_gives_way_at_once() -> None:
    driven = stands_still(WIDE, pages=2)
    driven.on(TakeBack(1, 2, PATIENCE_NS))
    assert gave_back(driven) == [(1, 2, False)]
    assert page_requests(driven) == [NeedPages(4, urgent=True)], "it waits for all of it now"


def test_what_is_left_when_the_last_request_is_given_up_is_given_at_once() -> None:
    """Nothing else might happen to an instance without work, and others stand still for it."""
    driven = lent(WIDE, pages=5)
    take(driven, 1, WIDE, prompt=20)
    settle(driven)
    driven.on(TakeBack(1, 5, PATIENCE_NS))
    driven.stepped(2, after_ns=PATIENCE_NS // 4)
    assert driven.said(NeedSlabs) and page_requests(driven)
    driven.on(REFUSED)
    driven.granted(refused=True)
    assert driven.said(GaveUp) and driven.core.queued == 0
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 5, False)]


def test_all_whose_kv_has_no_place_are_given_up_at_once_for_what_is_owed() -> None:
    driven = lent(WIDE, WIDE_2, SMALL, pages=20)
    for request, spec in enumerate((WIDE, WIDE_2, SMALL), 1):
        take(driven, request, spec, prompt=20 if request > 1 else 10)
        settle(driven)
    driven.on(TakeBack(1, 20 - 8, PATIENCE_NS))
    driven.granted(refused=True)
    assert [message.request for message in driven.said(GaveUp)] == [3, 2]
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 20 - 8, False)]


def two_resident(pages: int) -> Driven[DecodeCore]:
    """Request 1 of WIDE runs; all that request 2 of WIDE_2 needs is there for its turn."""
    driven = lent(WIDE, WIDE_2, pages=pages)
    take(driven, 1, WIDE, max_tokens=6)
    settle(driven)
    take(driven, 2, WIDE_2, max_tokens=6)
    settle(driven)
    assert driven.core.ledger.pool.free == pages - 8 and step(driven) == [1]
    return driven


def test_other_batches_kv_leaves_before_the_turn_ends() -> None:
    driven = two_resident(13)
    driven.on(TakeBack(1, 5 + 3 + 1, PATIENCE_NS))
    assert driven.asked(UnmapWeights) == [UnmapWeights(WIDE_2.model)] and driven.under_way(OUT)
    assert step(driven) == [1]
    driven.complete(OUT)
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 9, False)] and step(driven) == [1]


def test_a_gentle_trim_of_a_busy_instance_disturbs_nobody() -> None:
    driven = two_resident(13)
    driven.on(TakeBack(1, 13, PATIENCE_NS, gentle=True))
    assert not driven.asked(UnmapWeights) and not driven.under_way(OUT), "both models are needed"
    assert gave_back(driven) == [(1, 5, False)] and step(driven) == [1]
    driven.on(Cancel(RequestId(2), 1))
    driven.on(TakeBack(2, 13, PATIENCE_NS, gentle=True))
    assert driven.asked(UnmapWeights) == [UnmapWeights(WIDE_2.model)] and step(driven) == [1]
    driven.complete(SCRUB)
    assert gave_back(driven) == [(2, 4, False)] and driven.core.ledger.balloon.held == 4


def test_a_trim_leaves_the_weights_of_the_step_under_way() -> None:
    """Its request was cancelled, and nobody else waits for the model."""
    driven = lent(WIDE, pages=5)
    take(driven, 1, WIDE)
    settle(driven)
    driven.on(Cancel(RequestId(1), 1))
    driven.on(TakeBack(1, 5, PATIENCE_NS, gentle=True))
    assert not driven.asked(UnmapWeights) and gave_back(driven) == [(1, 1, False)]
    driven.stepped(2)
    driven.on(TakeBack(2, 5, PATIENCE_NS, gentle=True))
    assert driven.asked(UnmapWeights) == [UnmapWeights(WIDE.model)]


def test_a_trim_takes_no_more_than_it_is_to_keep() -> None:
    driven = two_turns(3 + 3 + 2)
    settle(driven)
    driven.on(Cancel(RequestId(2), 1))
    driven.on(TakeBack(1, 9, PATIENCE_NS, gentle=True, keep=7))
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 1, False)] and not driven.asked(UnmapWeights), "what was free was enough"


# --- prefetches that are given up -------------------------------------------------------------------------------------


def prefetching(pages: int = 20) -> Driven[DecodeCore]:
    """Request 1 of A runs, B is on its way for request 2."""
    driven = lent(A, B, pages=pages)
    take(driven, 1, A)
    settle(driven)
    take(driven, 2, B)
    assert driven.under_way(PREFETCH) == 1
    return driven


def test_a_prefetch_is_abandoned_when_the_plan_changes() -> None:
    driven = prefetching()
    free = driven.core.ledger.pool.free
    driven.on(Cancel(RequestId(2), 1))
    assert len(driven.asked(AbandonLoad)) == 1 and driven.core.counters.abandoned == 1
    assert step(driven) == [1] and driven.core.ledger.pool.free <= free, "its copy still writes there"
    driven.complete(PREFETCH)
    assert driven.asked(UnmapWeights) == [UnmapWeights(B.model)]
    assert driven.core.ledger.pool.free >= free + 3 and driven.core.counters.abandoned == 1


def test_a_model_that_is_wanted_again_while_its_abandoned_load_runs_is_loaded_anew() -> None:
    driven = prefetching()
    driven.on(Cancel(RequestId(2), 1))
    take(driven, 3, B)
    assert driven.loads == [A.model, B.model]
    driven.complete(PREFETCH)
    assert [type(e) for e in driven.last if isinstance(e, UnmapWeights | LoadWeights)] == [UnmapWeights, LoadWeights]
    driven.on(Cancel(RequestId(1), 1))
    driven.stepped(2)
    settle(driven)
    assert running(driven) == [3]


def test_a_prefetch_is_abandoned_when_the_turn_needs_its_memory() -> None:
    driven = lent(WIDE, WIDE_2, pages=3 + 1 + 3 + 1)
    take(driven, 1, WIDE)
    take(driven, 2, WIDE_2)
    driven.complete(WEIGHTS)
    driven.complete(IN)
    assert running(driven) == [1] and driven.under_way(PREFETCH) == 1
    while step(driven):
        assert not driven.asked(AbandonLoad)
    assert page_requests(driven) == [NeedPages(1, urgent=False, crowded=True)]
    driven.on(REFUSED)
    assert len(driven.asked(AbandonLoad)) == 1
    assert driven.core.counters.abandoned == 1 and running(driven) == []
    driven.complete(PREFETCH)
    assert driven.asked(UnmapWeights) == [UnmapWeights(WIDE_2.model)] and running(driven) == [1]


def test_what_is_needed_now_does_not_queue_behind_what_is_prefetched() -> None:
    driven = prefetching()
    assert [load.stream for load in driven.asked(LoadWeights, driven.effects)] == [WEIGHTS, PREFETCH]
