"""The prefill core where a policy says who is next."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from aegis.core.effects import LoadWeights
from aegis.core.ids import RequestId
from aegis.core.messages import Cancel, DropModel, ModelDropped, Submit
from aegis.core.model import ModelSpec, Slo
from aegis.core.views import WaitingJobs
from aegis.sim.faults.fake_models import PAGE, make_spec
from prefill.policies.least_slack import LeastSlackPrefill
from tests.sim.driven import Driven, make_job, prefill
from tests.unit.prefill.jobs import PREFETCH, TWO_MODELS_FIT, WEIGHTS, A, B, C, finish, loaded, ran

HASTY = make_spec(5, image_pages=3, block_bytes=PAGE // 4, slo=Slo(ttft_ns=2_000_000_000))
HURRIED = make_spec(6, image_pages=3, block_bytes=PAGE // 4, slo=Slo(ttft_ns=1_000_000_000))
SLACK = LeastSlackPrefill()


@dataclass
class LastFirst:
    """Who came last is next."""

    lines: list[WaitingJobs] = field(default_factory=list)

    def order(self, waiting: WaitingJobs, now_ns: int) -> list[int]:
        self.lines.append(waiting)
        return list(reversed(range(len(waiting.jobs))))


def submit(
    driven: Driven,
    request: int,
    spec: ModelSpec,
    group: int,
    *,
    prompt: int = 10,
    priority: int = 0,
    alone: bool = False,
) -> None:
    """If it is to run `alone`, its prompt's logprobs are asked for."""
    job = make_job(request, spec, prompt=prompt, priority=priority)
    if alone:
        job = replace(job, sampling=replace(job.sampling, prompt_logprobs=0))
    driven.on(Submit(job, group))


def test_a_newcomer_with_less_slack_goes_first_once_the_running_job_has_ended() -> None:
    driven = prefill(A, HASTY, pages=20, policy=SLACK)
    submit(driven, 1, HASTY, 1)
    loaded(driven)
    finish(driven)
    submit(driven, 2, A, 2)
    submit(driven, 3, A, 2, alone=True)
    loaded(driven)
    submit(driven, 4, HASTY, 3)
    for _ in range(3):
        finish(driven)
    assert ran(driven) == [1, 2, 4, 3]


def test_priority_counts_in_whole_deadlines() -> None:
    """Of a model's own: what arrives with 1 in a model of 2 s is due as what arrives 2 s later."""
    driven = prefill(HASTY, A, pages=20, policy=SLACK)
    submit(driven, 1, HASTY, 1)
    loaded(driven)
    for request, priority in ((2, 1), (3, 0), (4, -1), (5, -8)):
        submit(driven, request, HASTY, 1, priority=priority, alone=True)
    for _ in range(5):
        finish(driven)
    assert ran(driven) == [1, 5, 4, 3, 2]


def test_whose_model_is_there_runs_while_another_comes() -> None:
    driven = prefill(A, B, pages=20, policy=SLACK)
    submit(driven, 1, A, 1)
    loaded(driven)
    finish(driven)
    submit(driven, 2, B, 2)
    assert driven.under_way(WEIGHTS)
    submit(driven, 3, A, 3)
    assert ran(driven) == [1, 3]
    driven.complete(WEIGHTS)
    finish(driven)
    assert ran(driven) == [1, 3, 2]


def test_prefetch_follows_the_order() -> None:
    driven = prefill(A, B, C, HASTY, pages=20, policy=SLACK)
    submit(driven, 1, A, 1)
    submit(driven, 2, B, 2)
    submit(driven, 3, HASTY, 3)
    loaded(driven)
    assert [load.model for load in driven.asked(LoadWeights, driven.effects)][-1] == HASTY.model


def test_the_order_holds_when_jobs_leave_and_models_go() -> None:
    driven = prefill(A, B, pages=TWO_MODELS_FIT, policy=SLACK)
    for request, spec in enumerate([A, B, A, B], 1):
        submit(driven, request, spec, request)
    driven.on(Cancel(RequestId(3), 1))
    loaded(driven)
    finish(driven)
    driven.on(Cancel(RequestId(2), 1))
    driven.on(Cancel(RequestId(4), 1))
    while driven.under_way(PREFETCH):
        driven.complete(PREFETCH)
    assert ran(driven) == [1] and driven.core.queued == 0
    driven.on(DropModel(A.model))
    assert driven.said(ModelDropped) == [ModelDropped(A.model)]


def test_a_policy_sees_deadlines_loads_and_who_was_relieved() -> None:
    policy = LastFirst()
    driven = prefill(A, HURRIED, pages=20, policy=policy)
    submit(driven, 1, A, 1)
    submit(driven, 2, A, 1, prompt=100)
    submit(driven, 3, HURRIED, 2)
    waiting = policy.lines[-1]
    assert sorted(job.due_ns for job in waiting.jobs) == [1_000_000_000, 10_000_000_000, 10_000_000_000]
    assert set(waiting.load_ns) == {A.model, HURRIED.model} and waiting.relieved_ns == 0
    shorter, longer = sorted(job.prefill_ns for job in waiting.jobs if job.model == A.model)
    assert 0 < shorter < longer
    loaded(driven)
    assert ran(driven) == [3]
