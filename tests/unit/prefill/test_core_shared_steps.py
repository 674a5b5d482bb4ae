"""The prefill core where several prompts run in one step."""

from __future__ import annotations

from msgspec.structs import replace

from aegis.core.clock import NS_PER_MS
from aegis.core.effects import Run, Untrack
from aegis.core.events import StepFailed
from aegis.core.ids import InstanceId, RequestId
from aegis.core.messages import Broken, Cancel, Prefilled, Started, Submit
from aegis.core.model import ModelSpec, Slo
from aegis.sim.faults.fake_models import PAGE, make_spec
from prefill.core import PrefillCore
from prefill.policies.least_slack import LeastSlackPrefill
from tests.sim.driven import Driven, ledger, make_job, prefill
from tests.unit.prefill.jobs import A, B, loaded

SLACK = LeastSlackPrefill()
GAP = make_spec(5, image_pages=3, block_bytes=PAGE // 4, slo=Slo(gap_ns=4 * NS_PER_MS))


def rows(driven: Driven[PrefillCore]) -> list[int]:
    """Requests in the step that the last event has begun."""
    return [row.job.request for row in driven.prompts()]


def waiting(*requests: int, spec: ModelSpec = A, pages: int = 20) -> Driven[PrefillCore]:
    """Request 1 runs, and these have come meanwhile."""
    driven = prefill(spec, B, pages=pages, policy=SLACK)
    driven.on(Submit(make_job(1, spec), 1))
    loaded(driven)
    for request in requests:
        driven.on(Submit(make_job(request, spec, prompt=10 + request), 1))
    return driven


def test_prompts_that_wait_run_in_one_step() -> None:
    driven = waiting(2, 3, 4)
    driven.ran()
    assert rows(driven) == [2, 3, 4]
    assert [started.request for started in driven.said(Started)] == [2, 3, 4]
    (run,) = driven.asked(Run)
    assert [(row.start, row.stop, row.index) for row in run.rows] == [(0, 12, 0), (0, 13, 0), (0, 14, 0)]
    assert (run.steps, run.model) == (1, A.model)
    driven.ran(9, after_ns=39_000)
    prefilled = driven.said(Prefilled)
    assert [(each.request, each.token.id, each.duration_ns) for each in prefilled] == [
        (2, 9, 12_000),
        (3, 9, 13_000),
        (4, 9, 14_000),
    ], "each had a share of the step by its tokens"
    assert all(each.kv is not None and each.kv.tokens == 10 + each.request for each in prefilled)
    assert driven.core.counters.prefills == 4 and driven.core.running == 0


def test_a_step_has_no_more_tokens_of_prompts_than_it_may() -> None:
    core = PrefillCore(InstanceId("prefill-0"), ledger(20), SLACK, step_tokens=25)
    driven = Driven(core, (A,), slabs=64)
    driven.on(Submit(make_job(1, A), 1))
    loaded(driven)
    for request in (2, 3, 20):
        driven.on(Submit(make_job(request, A, prompt=10 + request), 1))
    seen = []
    for _ in range(4):
        driven.ran(9)
        seen.append([(row.job.request, row.start, row.stop) for row in driven.prompts()])
    assert seen == [[(2, 0, 12), (3, 0, 13)], [(20, 0, 25)], [(20, 25, 30)], []]


def test_without_a_policy_prompts_run_one_by_one() -> None:
    driven = prefill(A, pages=20)
    for request in (1, 2, 3):
        driven.on(Submit(make_job(request, A), 1))
    loaded(driven)
    assert rows(driven) == [1]
    driven.ran()
    assert rows(driven) == [2]


def test_a_prompt_whose_logprobs_are_asked_for_is_alone() -> None:
    driven = waiting(2)
    job = make_job(3, A)
    driven.on(Submit(replace(job, sampling=replace(job.sampling, prompt_logprobs=0)), 1))
    driven.on(Submit(make_job(4, A), 1))
    steps = []
    for _ in range(3):
        driven.ran()
        steps.append(rows(driven))
    assert steps == [[2], [3], [4]]


def test_a_step_takes_no_longer_than_a_gap_target() -> None:
    """Which is 4 ms, and a prompt takes more than 1 ms."""
    driven = waiting(*range(2, 9), spec=GAP)
    for _ in range(40):  # that a prompt takes 1.5 ms, of which 1.2 are its own
        driven.core._ordering.ran(GAP.model, 1_500_000, [(0, 14)])
        driven.core._ordering.ran(GAP.model, 2_700_000, [(0, 14), (0, 14)])
    driven.ran()
    assert rows(driven) == [2, 3, 4]


def test_what_gains_nothing_runs_alone() -> None:
    driven = waiting(2, 3)
    for _ in range(40):
        driven.core._ordering.ran(A.model, 1_500_000, [(0, 14)])
        driven.core._ordering.ran(A.model, 24_000_000, [(0, 14)] * 16)
    driven.ran()
    assert rows(driven) == [2]


def test_nobody_makes_way_for_a_prompt_that_joins() -> None:
    """There are four blocks, and the first prompt's leaves for host memory meanwhile."""
    driven = waiting(2, 3, 4, 5, pages=3 + 1)
    driven.ran()
    assert rows(driven) == [2, 3, 4]


def test_who_is_cancelled_in_a_step_gives_its_memory_back_and_the_others_go_on() -> None:
    driven = waiting(2, 3)
    driven.ran()
    assert rows(driven) == [2, 3]
    driven.on(Cancel(RequestId(3), 1))
    driven.ran()
    assert [each.request for each in driven.said(Prefilled)] == [2]
    assert set(driven.asked(Untrack)) == {Untrack(RequestId(2)), Untrack(RequestId(3))}


def test_prompts_of_a_step_that_failed_run_again_one_by_one_and_the_one_at_fault_fails_alone() -> None:
    driven = waiting(2, 3, 4)
    driven.ran()
    driven.on(Cancel(RequestId(4), 1))
    driven.on(StepFailed("why"))
    assert driven.said(Broken) == driven.said(Started) == []
    assert rows(driven) == [2]
    driven.on(Submit(make_job(5, A), 1))
    driven.ran()
    assert ([each.request for each in driven.said(Prefilled)], rows(driven)) == ([2], [3])
    assert driven.said(Started) == [], "it had started"
    driven.on(StepFailed("why"))
    assert driven.said(Broken) == [Broken(RequestId(3), 1, "why")]
    assert rows(driven) == [5]
    driven.ran()
    assert driven.core.running == driven.core.queued == 0 and not driven.core._queue.suspects


def test_who_shared_a_step_that_failed_can_be_cancelled_before_it_runs_again() -> None:
    driven = waiting(2, 3)
    driven.ran()
    driven.on(StepFailed("why"))
    driven.on(Cancel(RequestId(3), 1))
    driven.on(Submit(make_job(3, A), 1))
    driven.ran()
    assert rows(driven) == [3]
    assert [started.request for started in driven.said(Started)] == [3]


def test_who_would_go_on_from_the_kv_of_another_waits_for_it() -> None:
    core = PrefillCore(InstanceId("prefill-0"), ledger(20), SLACK, reuses=True)
    driven = Driven(core, (A,), slabs=64)
    driven.on(Submit(make_job(1, A), 1))
    loaded(driven)
    for request in (2, 3):
        driven.on(Submit(make_job(request, A, prompt=40), 1))
    driven.ran()
    assert rows(driven) == [2]
    driven.ran()
    ((row,),) = [run.rows for run in driven.asked(Run)]
    assert (row.job.request, row.start, row.stop) == (3, 39, 40)
