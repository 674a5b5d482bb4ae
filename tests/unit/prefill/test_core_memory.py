"""The prefill core, scripted: prefetch, and memory that lacks."""

from __future__ import annotations

from msgspec.structs import replace

from aegis.core.effects import (
    Run,
    UnmapWeights,
)
from aegis.core.ids import RequestId
from aegis.core.messages import (
    Cancel,
    ModelUnloaded,
    NeedSlabs,
    ReturnSlabs,
    Submit,
    SwitchDone,
    UnloadModel,
)
from aegis.sim.faults.fake_models import make_adapter
from tests.sim.driven import make_job, prefill
from tests.unit.prefill.jobs import TWO_MODELS_FIT, WIDE, A, B, C, finish, loaded, ran

# --- prefetch --------------------------------------------------------------------------------------------------------


def test_the_next_groups_model_comes_in_while_this_one_prefills() -> None:
    driven = prefill(A, B, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, B), 2))
    loaded(driven)
    assert driven.loads == [A.model, B.model]
    assert isinstance(driven.last[-1], Run), "the copy is under way when the step begins"
    loaded(driven)
    finish(driven)
    assert ran(driven) == [1, 2]
    (switch,) = [s for s in driven.said(SwitchDone, driven.effects) if s.model == B.model]
    assert switch.prefetched and (switch.make_room_ns, switch.copy_ns) == (0, 0)
    assert driven.core.counters.prefetches == 1 and driven.core.counters.switches == 2


def test_prefetching_evicts_only_models_that_nobody_waits_for() -> None:
    driven = prefill(A, B, C, pages=TWO_MODELS_FIT)
    for request, spec in enumerate((A, B), start=1):
        driven.on(Submit(make_job(request, spec), request))
        loaded(driven)
        finish(driven)
    assert set(driven.core.ledger.weights.resident()) == {A.model, B.model}
    driven.on(Submit(make_job(3, B), 3))
    driven.on(Submit(make_job(4, C), 4))
    assert driven.loads == [A.model, B.model, C.model], "A is not needed"
    loaded(driven)
    driven.on(Submit(make_job(5, A), 5))
    assert driven.loads == [A.model, B.model, C.model], "B runs and C is next"


def test_prefetching_takes_nothing_from_a_model_that_somebody_waits_for() -> None:
    driven = prefill(A, B, C, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, C), 1))
    loaded(driven)
    finish(driven)
    for request, spec in enumerate((A, B, C), start=2):
        driven.on(Submit(make_job(request, spec), request))
    loaded(driven)
    assert ran(driven) == [1, 2] and driven.loads == [C.model, A.model], "C stays, though B comes before it"
    finish(driven)
    assert driven.asked(UnmapWeights, driven.effects) == [UnmapWeights(A.model)]


def test_prefetching_takes_nothing_from_an_adapter_that_somebody_waits_for() -> None:
    adapter = make_adapter(4, A)
    driven = prefill(A, B, adapter, pages=TWO_MODELS_FIT)
    adapted = [replace(make_job(request, A), adapter=adapter.model) for request in (1, 3)]
    driven.on(Submit(adapted[0], 1))
    loaded(driven)
    loaded(driven)
    finish(driven)
    driven.on(Submit(make_job(2, A), 2))
    driven.on(Submit(adapted[1], 2))
    driven.on(Submit(make_job(4, B), 3))
    assert ran(driven) == [1, 2]
    finish(driven)
    assert ran(driven) == [1, 2, 3] and driven.loads == [A.model, adapter.model, B.model], "B comes beside request 3"


def test_prefetching_leaves_room_for_the_running_groups_kv() -> None:
    """Else the model would be evicted for the next job, and brought in again while that one runs, and so on."""
    driven = prefill(WIDE, B, pages=3 + 3 + 2)
    driven.on(Submit(make_job(1, WIDE, prompt=16), 1))
    driven.on(Submit(make_job(2, WIDE, prompt=32), 1))
    driven.on(Submit(make_job(3, B), 2))
    loaded(driven)
    assert driven.loads == [WIDE.model]
    finish(driven)
    assert driven.loads == [WIDE.model, B.model], "nobody of this group is left"


def test_one_model_is_brought_in_at_a_time() -> None:
    driven = prefill(A, B, C, pages=20)
    for request, spec in enumerate((A, B, C), start=1):
        driven.on(Submit(make_job(request, spec), request))
    loaded(driven)
    assert driven.loads == [A.model, B.model]
    loaded(driven)
    assert driven.loads == [A.model, B.model], "B comes next, C is not needed yet"


# --- memory that lacks -----------------------------------------------------------------------------------------------


def test_idle_weights_make_room_for_kv() -> None:
    driven = prefill(A, WIDE, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    loaded(driven)
    finish(driven)
    driven.on(Submit(make_job(2, WIDE, prompt=48), 2))
    loaded(driven)
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)]
    assert ran(driven) == [1, 2]


def test_models_needed_last_leave_first() -> None:
    driven = prefill(A, B, C, pages=TWO_MODELS_FIT)
    for request, spec in enumerate((A, B), start=1):
        driven.on(Submit(make_job(request, spec), request))
        loaded(driven)
        finish(driven)
    driven.on(Submit(make_job(3, C, prompt=10), 3))
    assert driven.asked(UnmapWeights) == [UnmapWeights(A.model)], "of two that nobody needs the first by name"
    driven.on(Submit(make_job(4, A), 4))
    loaded(driven)
    finish(driven)
    loaded(driven)
    assert driven.asked(UnmapWeights, driven.effects)[1:] == [UnmapWeights(B.model)]


def test_a_lack_of_host_slabs_is_asked_for_once_and_waited_out() -> None:
    driven = prefill(WIDE, pages=8, slabs=None)
    driven.granted(0)
    driven.on(Submit(make_job(1, WIDE, prompt=48), 1))
    loaded(driven)
    assert driven.said(ReturnSlabs)[0].slabs == (0,), "who waits holds nothing idle"
    assert driven.said(NeedSlabs) == [NeedSlabs(3)]
    driven.granted(refused=True)
    driven.on(Submit(make_job(2, WIDE), 1))
    assert not driven.said(NeedSlabs) and ran(driven) == []
    driven.granted(4, 5, 6)
    assert ran(driven) == [1]


def test_surplus_slabs_go_back_but_for_one() -> None:
    driven = prefill(WIDE, pages=8, slabs=None)
    driven.granted(0, 1, 2)
    assert [len(message.slabs) for message in driven.said(ReturnSlabs)] == [2]


def test_slabs_granted_too_late_go_back() -> None:
    driven = prefill(WIDE, pages=8, slabs=None)
    driven.on(Submit(make_job(1, WIDE, prompt=48), 1))
    loaded(driven)
    driven.on(Cancel(RequestId(1), 1))
    driven.granted(1, 2, 3)
    assert [len(message.slabs) for message in driven.said(ReturnSlabs)] == [2]


# --- unloading -------------------------------------------------------------------------------------------------------


def test_a_model_is_unloaded_when_nobody_waits_for_it() -> None:
    driven = prefill(A, B, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    loaded(driven)
    driven.on(Submit(make_job(2, A), 1))
    driven.on(UnloadModel(A.model))
    finish(driven)
    assert not driven.asked(UnmapWeights, driven.effects), "the second is next"
    driven.on(Cancel(RequestId(2), 1))
    assert not driven.said(ModelUnloaded), "its prefill is under way"
    finish(driven)
    assert driven.asked(UnmapWeights, driven.effects) == [UnmapWeights(A.model)]
    assert driven.said(ModelUnloaded, driven.effects) == [ModelUnloaded(A.model)]
    assert driven.core.active is None
    driven.on(Submit(make_job(3, A), 2))
    loaded(driven)
    assert ran(driven) == [1, 2, 3] and driven.loads == [A.model, A.model]


def test_a_prefetch_that_nobody_needs_any_more_is_unloaded_when_it_has_stopped() -> None:
    driven = prefill(A, B, pages=TWO_MODELS_FIT)
    driven.on(Submit(make_job(1, A), 1))
    driven.on(Submit(make_job(2, B), 2))
    loaded(driven)
    driven.on(UnloadModel(B.model))
    driven.on(Cancel(RequestId(2), 1))
    assert not driven.said(ModelUnloaded, driven.effects)
    loaded(driven)
    assert driven.said(ModelUnloaded) == [ModelUnloaded(B.model)]
    assert driven.core.ledger.weights.resident() == (A.model,)
