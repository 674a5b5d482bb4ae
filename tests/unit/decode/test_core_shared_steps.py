"""The core of a mixed instance where prompts run in one step, and sequences that decode have theirs in it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from aegis.core.clock import NS_PER_MS
from aegis.core.effects import Track, Untrack
from aegis.core.estimators import Hardware
from aegis.core.events import StepFailed
from aegis.core.ids import InstanceId, RequestId
from aegis.core.messages import Broken, Cancel, Phase, Prefilled, SetSlo, Started, Submit
from aegis.core.views import BatchView, Renewal, Turn, TurnRules
from decode.core import DecodeCore
from tests.sim.driven import Driven, decode, ledger, make_job
from tests.unit.decode.turns import IN, TWO_MODELS_FIT, WEIGHTS, A, beside, running, settle, take


class Joining:
    """The turn is the first batch's for ever, in pieces that end by `free_until_ns`."""

    def __init__(self, free_until_ns: int | None = None, **rules: object) -> None:
        self.rules = TurnRules(renewal=Renewal.ARRIVAL, chunk_tokens=16, **rules)  # type: ignore[arg-type]
        self.free_until_ns = free_until_ns

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return [Turn(batch.batch, None, self.free_until_ns) for batch in batches]


def rows(driven: Driven[DecodeCore]) -> list[int]:
    """Requests of the prompts in the step that the last event has begun."""
    return [row.job.request for row in driven.prompts()]


def waiting(*requests: int, policy: Joining | None = None, pages: int = TWO_MODELS_FIT) -> Driven[DecodeCore]:
    """Prompts of ten tokens and their numbers, that have come while the weights did."""
    driven = decode(A, pages=pages, policy=policy or Joining())
    for request in requests:
        driven.on(Submit(make_job(request, A, prompt=10 + request)))
    driven.complete(WEIGHTS)
    return driven


def test_prompts_that_wait_run_in_one_step_and_decode_together() -> None:
    driven = waiting(1, 2, 3)
    assert rows(driven) == [1, 2, 3]
    assert [started.request for started in driven.said(Started)] == [1, 2, 3]
    driven.ran(9, after_ns=36_000)
    prefilled = [(each.request, each.token.id, each.duration_ns) for each in driven.said(Prefilled)]
    assert prefilled == [(1, 9, 11_000), (2, 9, 12_000), (3, 9, 13_000)], "a share of the step by its tokens"
    assert running(driven) == [1, 2, 3]
    assert [row.start for run in driven.runs() for row in run.rows] == [11, 12, 13]


def test_a_stream_has_a_step_between_two_prompts_that_run_alone() -> None:
    """However many of them come: each is done with its first token, and they never fill the batch."""
    driven = waiting(1)
    driven.ran(9)
    assert running(driven) == [1]
    for request in range(2, 6):
        job = make_job(request, A, max_tokens=1)
        driven.on(Submit(replace(job, sampling=replace(job.sampling, prompt_logprobs=0))))
    driven.stepped(2)
    seen = []
    for _ in range(8):
        seen.append((rows(driven), running(driven)))
        driven.stepped(9 if rows(driven) else 2)
    assert seen == [each for request in range(2, 6) for each in (([request], []), ([], [1]))]


def test_a_budget_of_tokens_is_filled_by_prompts_in_order() -> None:
    """Of the last one as much as fits, in whole blocks (Sarathi-Serve, Algorithm 3)."""
    driven = waiting(1, 2, 70, policy=Joining(budget_tokens=64))
    parts = [(row.job.request, row.start, row.stop) for row in driven.prompts()]
    assert parts == [(1, 0, 11), (2, 0, 12), (70, 0, 32)]
    driven.ran(9)
    assert [message.request for message in driven.said(Prefilled)] == [1, 2]
    driven.stepped(2, 2)
    assert [(row.job.request, row.start, row.stop) for row in driven.prompts()] == [(70, 32, 80)]


def test_a_step_has_no_more_tokens_of_prompts_than_it_may_however_much_time_there_is() -> None:
    driven = waiting(1, 2, 70, policy=Joining(step_tokens=23))
    assert [(row.job.request, row.start, row.stop) for row in driven.prompts()] == [(1, 0, 11), (2, 0, 12)]
    driven.ran(9)
    assert [(row.job.request, row.start, row.stop) for row in driven.prompts()] == [(70, 0, 23)]
    driven.stepped(2, 2)
    assert [(row.job.request, row.start, row.stop) for row in driven.prompts()] == [(70, 23, 46)]


def test_a_budget_is_no_more_than_a_step_may_have() -> None:
    driven = waiting(1, 70, policy=Joining(budget_tokens=64, step_tokens=43))
    assert [(row.job.request, row.start, row.stop) for row in driven.prompts()] == [(1, 0, 11), (70, 0, 32)]


def test_policies_that_cut_nothing_run_prompts_one_by_one() -> None:
    policy = Joining()
    policy.rules = TurnRules(renewal=Renewal.ARRIVAL)
    assert rows(waiting(1, 2, policy=policy)) == [1]


def test_a_prompt_has_to_save_enough_of_its_time() -> None:
    assert rows(waiting(1, 2, policy=Joining(join_gain=1.0))) == [1]


def test_a_step_of_prompts_is_no_longer_than_a_stream_may_pause_now() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, policy=Joining())
    for request in (1, 2):
        driven.on(Submit(make_job(request, A)))
    driven.on(SetSlo(A.model, replace(A.slo, gap_ns=1)))
    driven.complete(WEIGHTS)
    assert rows(driven) == [1]


def test_a_step_ends_when_somebody_needs_the_next_one() -> None:
    assert rows(waiting(1, 2, 3, policy=Joining(free_until_ns=0))) == [1]


def test_nobody_is_late_because_others_join() -> None:
    """Each takes 4 ms, and 3 ms of them beside others; the first one's token is due in 10 ms."""
    driven = decode(A, pages=TWO_MODELS_FIT, policy=Joining())
    latency = driven.core._step_times.latency[A.model]
    for _ in range(40):
        latency.saw_step([(0, 12)], 4 * NS_PER_MS)
        latency.saw_step([(0, 12)] * 4, 13 * NS_PER_MS)
    for request in (1, 2, 3, 4, 5):
        now_ns = driven.now_ns
        arrival_ns = now_ns - A.slo.ttft_ns + 16 * NS_PER_MS if request == 1 else now_ns
        driven.on(Submit(make_job(request, A, prompt=12, arrival_ns=arrival_ns)))
    driven.complete(WEIGHTS)
    assert rows(driven) == [1, 2, 3]


def test_a_prompt_whose_logprobs_are_asked_for_is_alone() -> None:
    """The streams have a step behind it."""
    driven = waiting(1)
    for request, reports in ((2, False), (3, True), (4, False)):
        job = make_job(request, A)
        sampling = replace(job.sampling, prompt_logprobs=0 if reports else None)
        driven.on(Submit(replace(job, sampling=sampling, arrival_ns=request)))
    steps = []
    for _ in range(2):
        driven.ran()
        steps.append((rows(driven), beside(driven)))
    driven.ran()
    assert running(driven) == [1, 2, 3]
    driven.ran()
    steps.append((rows(driven), beside(driven)))
    assert steps == [([2], [1]), ([3], []), ([4], [1, 2, 3])]


def test_a_prompt_that_comes_to_a_batch_that_decodes_has_its_streams_beside_it() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, policy=Joining())
    take(driven, 1, A)
    settle(driven)
    driven.on(Submit(make_job(2, A)))
    driven.stepped(2)
    assert (rows(driven), beside(driven)) == ([2], [1])
    assert driven.core.counters.steps == 1
    driven.ran(4)
    assert running(driven) == [1, 2] and driven.core.counters.steps == 2


def test_streams_that_were_stopped_are_said_to_run_beside_a_prompt() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, policy=Joining())
    take(driven, 1, A)
    driven.on(Submit(make_job(2, A)))
    driven.complete(IN)
    driven.complete(WEIGHTS)
    phases = [phase for phase in driven.said(Phase, driven.effects) if phase.running]
    assert beside(driven) == [1] and phases[-1].requests == (1,)


def test_the_time_of_a_shared_step_teaches_what_sharing_saves() -> None:
    """And nothing about decode steps."""
    driven = waiting(1, 2, 3, 4)
    latency = driven.core._step_times.latency[A.model]
    fixed_ns, step_ns = latency.fixed_ns(), latency.decode_ns(10)
    driven.ran(after_ns=80 * NS_PER_MS)
    assert latency.fixed_ns() != fixed_ns and latency.decode_ns(10) == step_ns


def test_who_is_cancelled_in_a_step_leaves_and_the_others_go_on() -> None:
    driven = waiting(1, 2, 3)
    driven.on(Cancel(RequestId(2), 1))
    assert driven.asked(Untrack) == [Untrack(RequestId(2))]
    driven.ran(9)
    assert [each.request for each in driven.said(Prefilled)] == [1, 3]
    assert running(driven) == [1, 3]


def test_of_a_shared_step_that_failed_only_the_prompt_at_fault_ends() -> None:
    driven = decode(A, pages=TWO_MODELS_FIT, policy=Joining())
    take(driven, 1, A)
    settle(driven)
    for request in (2, 3):
        driven.on(Submit(make_job(request, A)))
    driven.stepped(2)
    assert (rows(driven), beside(driven)) == ([2, 3], [1])
    driven.on(StepFailed("why"))
    assert not driven.said(Broken) and (rows(driven), beside(driven)) == ([2], [])
    driven.on(StepFailed("why"))
    assert [broken.request for broken in driven.said(Broken)] == [2]
    assert running(driven) == [1], "it was left out"
    driven.ran()
    assert (rows(driven), beside(driven)) == ([3], [])
    driven.ran(9)
    assert [prefilled.request for prefilled in driven.said(Prefilled)] == [3]
    assert running(driven) == [1, 3]
    assert [started.request for started in driven.said(Started, driven.effects)] == [2, 3]


def test_who_would_go_on_from_the_kv_of_another_waits_for_it() -> None:
    core = DecodeCore(InstanceId("decode-0"), ledger(TWO_MODELS_FIT), Joining(), Hardware(), reuses=True)
    driven = Driven(core, (A,), slabs=64)
    for request in (1, 2):
        driven.on(Submit(make_job(request, A, prompt=40)))
    driven.complete(WEIGHTS)
    assert rows(driven) == [1]
    driven.ran()
    (row,) = driven.prompts()
    assert (row.job.request, row.start, row.stop) == (2, 39, 40) and beside(driven) == [1]
    assert driven.asked(Track), "the engine has to be told where it begins"


def test_after_a_step_the_next_one_may_take_as_long_again() -> None:
    """Another plan is made, which says for how long: what the last one left of its time may be next to nothing."""
    policy = Joining(free_until_ns=0)
    driven = waiting(1, 30, policy=policy)
    assert rows(driven) == [1]
    policy.free_until_ns = 10_000 * NS_PER_MS
    driven.ran()
    assert [(row.job.request, row.start, row.stop) for row in driven.prompts()] == [(30, 0, 40)]
