"""The prefill core, scripted: pages asked of the device, pages given back to it, prefetches given up for them."""

from __future__ import annotations

import pytest

from aegis.core.decision import Decision
from aegis.core.effects import AbandonLoad, LoadWeights, UnmapWeights
from aegis.core.events import LoadFailed, Tick
from aegis.core.ids import InstanceId, PageRun, RequestId
from aegis.core.messages import (
    Broken,
    Cancel,
    DropModel,
    EvictImage,
    GaveBack,
    GaveUp,
    GrantPages,
    ImageCached,
    ImageEvicted,
    ImageUnreadable,
    ModelDropped,
    NeedPages,
    Submit,
    TakeBack,
)
from aegis.core.model import ModelSpec
from aegis.core.views import PrefillOrder
from aegis.sim.faults.fake_models import PAGE, make_spec
from memory.ledger import Ledger
from memory.pages import count_pages
from prefill.core import PrefillCore
from prefill.policies.least_slack import LeastSlackPrefill
from tests.sim.driven import WORDS, Driven, budget, make_job
from tests.unit.prefill.jobs import OUT, PREFETCH, SCRUB, TWO_MODELS_FIT, WEIGHTS, WIDE, A, B, C, finish, loaded, ran

SMALL = make_spec(7, image_pages=1, block_bytes=PAGE)
PATIENCE_NS = 40_000_000
REFUSED = GrantPages((), refused=True)
EXCESSIVE = GrantPages((), refused=True, excessive=True)


def lent(
    *specs: ModelSpec,
    pages: int,
    slabs: int | None = 64,
    policy: PrefillOrder | None = None,
    explains: bool = False,
) -> Driven[PrefillCore]:
    """So many pages of a device of 30, for which the test answers."""
    books = Ledger(budget(30), WORDS, address_pages=1000)
    books.balloon.granted(GrantPages((PageRun(0, pages),)))
    books.drain()
    driven = Driven(PrefillCore(InstanceId("prefill-0"), books, policy, explains=explains), specs, slabs=slabs)
    driven.refusing = False
    return driven


def submit(driven: Driven[PrefillCore], request: int, spec: ModelSpec, *, prompt: int = 10) -> None:
    driven.on(Submit(make_job(request, spec, prompt=prompt), request))


def page_requests(driven: Driven[PrefillCore]) -> list[NeedPages]:
    return driven.said(NeedPages)


def gave_back(driven: Driven[PrefillCore]) -> list[tuple[int, int, bool]]:
    """Numbers, pages, and whether it was refused."""
    return [(m.number, count_pages(m.runs), m.refused) for m in driven.said(GaveBack)]


def had_a_step(pages: int = TWO_MODELS_FIT) -> Driven[PrefillCore]:
    """A is there and has run; B's job waits for its weights."""
    driven = lent(A, B, pages=pages)
    submit(driven, 1, A)
    loaded(driven)
    finish(driven)
    return driven


# --- asking -----------------------------------------------------------------------------------------------------------


def test_the_device_is_asked_before_anything_is_evicted() -> None:
    driven = had_a_step(4)
    submit(driven, 2, B)
    assert page_requests(driven) == [NeedPages(2, urgent=False)] and not driven.asked(UnmapWeights)
    driven.on(REFUSED)
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)] and driven.loads[-1] == B.model


def test_it_is_asked_for_kv_before_idle_weights_go() -> None:
    driven = lent(A, WIDE, pages=7)
    submit(driven, 1, A)
    loaded(driven)
    finish(driven)
    submit(driven, 2, WIDE, prompt=48)
    loaded(driven)
    assert page_requests(driven) == [NeedPages(2, urgent=False)] and not driven.asked(UnmapWeights, driven.effects)
    driven.on(REFUSED)
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)] and ran(driven) == [1, 2]


def test_what_it_grants_saves_an_eviction() -> None:
    driven = had_a_step(4)
    submit(driven, 2, B)
    driven.on(GrantPages((PageRun(4, 7),)))
    loaded(driven)
    assert ran(driven) == [1, 2] and not driven.asked(UnmapWeights, driven.effects)


def test_pages_are_wanted_urgently_when_nothing_is_left_to_evict() -> None:
    """All that is lacking at once: weights and the whole prompt's blocks."""
    driven = lent(WIDE, pages=2)
    submit(driven, 1, WIDE, prompt=40)
    assert page_requests(driven) == [NeedPages(1, urgent=False)]
    driven.on(REFUSED)
    assert page_requests(driven) == [NeedPages(4, urgent=True)]
    driven.on(REFUSED)
    assert not page_requests(driven) and not driven.loads
    driven.on(GrantPages((PageRun(2, 6),)))
    loaded(driven)
    assert ran(driven) == [1] and not page_requests(driven)


def test_who_is_content_lets_others_keep_what_they_have() -> None:
    driven = lent(WIDE, SMALL, pages=2)
    submit(driven, 1, WIDE)
    driven.on(REFUSED)
    driven.on(REFUSED)
    driven.on(Cancel(RequestId(1), 1))
    submit(driven, 2, SMALL)
    loaded(driven)
    assert ran(driven) == [2]
    assert [w.urgent for w in driven.said(NeedPages, driven.effects)] == [False, True, False]


def test_what_a_limit_forbids_ends_with_a_clear_reason_and_holds_up_nobody() -> None:
    driven = lent(WIDE, SMALL, pages=2)
    submit(driven, 1, WIDE)
    submit(driven, 2, SMALL)
    driven.on(REFUSED)
    driven.on(EXCESSIVE)
    (broken,) = driven.said(Broken)
    assert broken.request == 1 and "memory limit of its instance" in broken.reason
    loaded(driven)
    assert ran(driven) == [2]


def test_who_comes_after_a_job_that_its_limit_ends_is_explained_by_its_own_numbers() -> None:
    driven = lent(WIDE, SMALL, pages=2, policy=LeastSlackPrefill(), explains=True)
    submit(driven, 1, WIDE)
    submit(driven, 2, SMALL)
    driven.on(REFUSED)
    driven.on(EXCESSIVE)
    assert [broken.request for broken in driven.said(Broken)] == [1]
    loaded(driven)
    (decision,) = driven.asked(Decision)
    assert decision.requests == (2,) and decision.why.because.startswith("first of 1 in line")


# --- giving back ------------------------------------------------------------------------------------------------------


def test_what_is_idle_is_given_at_once() -> None:
    driven = had_a_step()
    driven.on(TakeBack(1, TWO_MODELS_FIT, PATIENCE_NS))
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)]
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, TWO_MODELS_FIT, False)]


def test_a_job_that_has_not_run_keeps_what_it_was_granted() -> None:
    driven = lent(A, pages=4)
    submit(driven, 1, A)
    driven.on(TakeBack(1, 4, PATIENCE_NS))
    driven.on(Tick(), after_ns=PATIENCE_NS // 2)
    loaded(driven)
    assert ran(driven) == [1]
    driven.stepped(5)
    driven.complete(OUT)
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 4, False)]


def test_the_model_in_front_makes_way_when_its_time_is_over() -> None:
    driven = lent(A, pages=4)
    for request in (1, 2, 3):
        submit(driven, request, A)
    loaded(driven)
    driven.on(TakeBack(1, 4, PATIENCE_NS))
    finish(driven)
    assert ran(driven) == [1, 2], "there is time"
    driven.stepped(5, after_ns=PATIENCE_NS // 4)
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)] and ran(driven) == [1, 2]
    driven.complete(OUT)
    driven.on(REFUSED)
    driven.on(REFUSED)
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 4, False)]


def test_what_cannot_be_had_in_time_is_refused_and_nothing_given() -> None:
    driven = lent(A, pages=4)
    submit(driven, 1, A)
    driven.on(TakeBack(1, 4, PATIENCE_NS))
    driven.on(Tick(), after_ns=PATIENCE_NS)
    assert driven.said(GaveBack) == [GaveBack(1, (), refused=True, spare=0)]
    loaded(driven)
    assert ran(driven) == [1] and driven.core.ledger.balloon.held == 4


def test_who_stands_still_gives_way_at_once() -> None:
    driven = lent(WIDE, pages=2)
    submit(driven, 1, WIDE)
    driven.on(REFUSED)
    driven.on(REFUSED)
    driven.on(TakeBack(1, 2, PATIENCE_NS))
    assert gave_back(driven) == [(1, 2, False)] and page_requests(driven) == [NeedPages(4, urgent=True)]


def test_who_waits_for_host_slabs_makes_way_when_its_time_is_over() -> None:
    """Others may need these pages to get to where they free host slabs."""
    driven = lent(A, pages=4, slabs=None)
    submit(driven, 1, A)
    loaded(driven)
    driven.on(TakeBack(1, 4, PATIENCE_NS))
    driven.on(Tick(), after_ns=PATIENCE_NS // 4)
    assert not driven.asked(UnmapWeights), "the node has not answered yet"
    driven.granted(refused=True)
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)]
    driven.complete(SCRUB)
    assert gave_back(driven) == [(1, 4, False)] and not ran(driven)


def test_giving_way_while_idle_leaves_the_next_job_its_first_step() -> None:
    """What is owed still lacks what an abandoned load writes; the job that comes meanwhile keeps what comes back."""
    driven = lent(A, pages=4)
    submit(driven, 1, A)
    driven.on(Cancel(RequestId(1), 1))
    driven.on(TakeBack(1, 4, PATIENCE_NS))
    submit(driven, 2, A)
    loaded(driven)
    assert driven.loads == [A.model] * 2 and not driven.said(GaveBack, driven.effects)


def test_a_gentle_trim_of_a_busy_instance_disturbs_nobody() -> None:
    driven = had_a_step()
    submit(driven, 2, B)
    loaded(driven)
    driven.on(TakeBack(1, TWO_MODELS_FIT, PATIENCE_NS, gentle=True))
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)], "nobody needs it"
    driven.complete(SCRUB)
    assert driven.core.running == 1 and driven.core.ledger.weights.is_resident(B.model)
    finish(driven)
    assert driven.core.ledger.balloon.held == TWO_MODELS_FIT - 4


# --- loads that are given up ------------------------------------------------------------------------------------------


def prefetching(pages: int = 20) -> Driven[PrefillCore]:
    """Job 1 of A runs, B is on its way for job 2."""
    driven = lent(A, B, pages=pages)
    submit(driven, 1, A)
    submit(driven, 2, B)
    driven.complete(WEIGHTS)
    assert driven.under_way(PREFETCH) == 1
    return driven


def test_a_prefetch_is_abandoned_when_the_plan_changes() -> None:
    driven = prefetching()
    free = driven.core.ledger.pool.free
    driven.on(Cancel(RequestId(2), 1))
    assert len(driven.asked(AbandonLoad)) == 1 and driven.core.counters.abandoned == 1
    finish(driven)
    assert driven.core.ledger.pool.free == free + 1, "its copy still writes there"
    driven.complete(PREFETCH)
    assert driven.asked(UnmapWeights) == [UnmapWeights(B.model)] and driven.core.ledger.pool.free == free + 4


def test_a_model_that_is_wanted_again_while_its_abandoned_load_runs_is_loaded_anew() -> None:
    driven = prefetching()
    driven.on(Cancel(RequestId(2), 1))
    submit(driven, 3, B)
    driven.complete(PREFETCH)
    assert [type(e) for e in driven.last if isinstance(e, UnmapWeights | LoadWeights)] == [UnmapWeights, LoadWeights]
    loaded(driven)
    finish(driven)
    assert ran(driven) == [1, 3]


def test_a_prefetch_is_abandoned_when_the_next_job_needs_its_memory() -> None:
    driven = prefetching(3 + 1 + 3)
    finish(driven)
    driven.on(Cancel(RequestId(2), 1))
    submit(driven, 3, A, prompt=16 * 4 * 2)
    while not driven.prompts() and page_requests(driven):
        driven.on(REFUSED)
    assert ran(driven) == [1] and driven.core.counters.abandoned == 1
    driven.complete(PREFETCH)
    assert ran(driven) == [1, 3]


@pytest.mark.parametrize("waiting", [1, 2])
def test_who_waits_for_a_model_that_cannot_be_read_is_given_up_and_the_next_tries_again(waiting: int) -> None:
    driven = lent(A, pages=TWO_MODELS_FIT)
    for request in range(1, waiting + 1):
        submit(driven, request, A)
    driven.on(LoadFailed(A.model, "why"))
    assert driven.said(ImageUnreadable) == [ImageUnreadable(A.model, "why")]
    assert driven.said(GaveUp) == [GaveUp(RequestId(request), 1) for request in range(1, waiting + 1)]
    submit(driven, 9, A)
    assert driven.loads == [A.model], "what is there is not its weights"
    loaded(driven)
    loaded(driven)
    assert driven.loads == [A.model] * 2 and ran(driven) == [9]


def test_a_model_that_cannot_be_read_is_removed_while_another_runs_and_a_third_is_waited_for() -> None:
    driven = lent(A, B, C, pages=4, policy=LeastSlackPrefill())
    submit(driven, 1, A)
    loaded(driven)
    submit(driven, 2, B)
    submit(driven, 3, C)
    driven.on(GrantPages((PageRun(4, 8),)))
    driven.on(LoadFailed(B.model, "why"))
    assert driven.said(GaveUp) == [GaveUp(RequestId(2), 1)]
    driven.on(DropModel(B.model))
    driven.complete(PREFETCH)
    assert driven.said(ModelDropped) == [ModelDropped(B.model)]
    loaded(driven)
    finish(driven)
    assert ran(driven) == [1, 3]


def test_an_image_is_let_go_of_when_the_load_from_it_has_passed() -> None:
    driven = lent(A, pages=TWO_MODELS_FIT)
    driven.on(ImageCached(A.model, (PageRun(3, 6),)))
    submit(driven, 1, A)
    assert [load.cached for load in driven.asked(LoadWeights)] == [(PageRun(3, 6),)]
    driven.on(EvictImage(A.model))
    assert not driven.said(ImageEvicted)
    loaded(driven)
    assert driven.said(ImageEvicted) == [ImageEvicted(A.model)] and ran(driven) == [1]
