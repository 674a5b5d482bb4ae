"""Prefills by slack: where they go, who is next, and that nobody starves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.decision import Why
from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import PrefillJob, PrefillPlacement, WaitingJobs, Work
from aegis.sim.faults.fake_models import make_spec
from prefill.policies.least_slack import LeastSlackPrefill
from proxy.routing.prefill_queues import PrefillQueues

SPECS = [make_spec(i, image_pages=2, block_bytes=128) for i in range(3)]
A, B, C = (spec.model for spec in SPECS)
LATENCY = {spec.model: Latency(spec.manifest, Hardware()) for spec in SPECS}
SWITCH_NS, RUN_NS = LATENCY[A].switch_ns(), LATENCY[A].prefill_ns(10)
X, Y, Z = (InstanceId(name) for name in "xyz")
POLICY, STRICT = LeastSlackPrefill(), LeastSlackPrefill(grace=0.0)
TTFT = 100


class Queues:
    """Of x, y and z; `join` fills them by hand."""

    def __init__(self, ttft_ns: int = 10**12) -> None:
        self.view = PrefillQueues(POLICY.max_group_size, LATENCY, dict.fromkeys(LATENCY, ttft_ns))
        self.requests = 0
        for instance in (X, Y, Z):
            self.view.up(instance)

    def join(self, instance: InstanceId, model: ModelId, *, jobs: int = 1) -> list[RequestId]:
        """A new group; returns its requests."""
        group, joined = None, []
        for _ in range(jobs):
            self.requests += 1
            joined.append(RequestId(self.requests))
            group = self.view.add(PrefillPlacement(instance, group), joined[-1], Work(model, 10))
        return joined

    def visit(self, instance: InstanceId, model: ModelId) -> None:
        """Somebody was prefilled there."""
        (request,) = self.join(instance, model)
        self.view.remove(instance, request)

    def place(self, model: ModelId) -> PrefillPlacement:
        return POLICY.place(Work(model, 10), self.view)


def test_a_request_joins_others_of_its_model_while_there_is_time() -> None:
    queues = Queues()
    queues.join(Y, A, jobs=9)
    assert queues.place(A) == PrefillPlacement(Y, 1)
    queues.join(Z, A)
    assert queues.place(A) == PrefillPlacement(Z, 1), "where there is the least to do"


def test_it_goes_elsewhere_where_its_token_would_come_late() -> None:
    queues = Queues(ttft_ns=SWITCH_NS + 20 * RUN_NS)
    queues.join(Y, A, jobs=18)
    assert queues.place(A) == PrefillPlacement(Y, 1)
    queues.join(Y, B, jobs=40)
    assert queues.place(A) == PrefillPlacement(X, None)
    queues.join(X, B, jobs=30)
    queues.join(Z, B, jobs=30)
    assert queues.place(A) == PrefillPlacement(Y, 1), "unless it is late everywhere"


def test_it_goes_back_to_where_its_model_may_still_be() -> None:
    queues = Queues()
    queues.visit(Z, A)
    assert queues.place(A) == PrefillPlacement(Z, None)
    queues.join(Z, B)
    assert queues.place(A).instance != Z, "until its first token comes sooner elsewhere"


def test_models_spread_over_instances_that_have_as_little_to_do() -> None:
    queues = Queues()
    queues.visit(X, A)
    assert queues.place(B) == PrefillPlacement(Y, None)
    queues.visit(Y, B)
    assert queues.place(C) == PrefillPlacement(Z, None)
    queues.join(Z, B, jobs=9)
    assert queues.place(C) == PrefillPlacement(Y, None), "b has moved"


def job(model: ModelId, due: int, prefill: int = 10, *, arrival: int = 0) -> PrefillJob:
    return PrefillJob(model, arrival, due, due, TTFT, prefill, switch_ns=50)


def order(
    *jobs: PrefillJob, load_ns: Mapping[ModelId, int] | None = None, now: int = 0, relieved: int = 0
) -> list[int]:
    return STRICT.order(WaitingJobs(jobs, load_ns or {}, relieved), now)


def test_a_newcomer_with_less_slack_goes_first() -> None:
    assert order(job(A, 100), job(B, 90)) == [1, 0]
    assert order(job(A, 100), job(B, 90), load_ns={B: 10}) == [0, 1], "whose model comes meanwhile"
    assert order(job(A, 100, 85), job(B, 90), load_ns={B: 10}) == [1, 0]


def test_who_cannot_be_saved_goes_last_and_is_not_dropped() -> None:
    assert order(job(A, 5), job(B, 100)) == [1, 0], "it is late already"
    assert order(job(A, 60, 50), job(B, 65, 20), job(C, 70, 20)) == [1, 2, 0]
    assert order(job(B, 5), job(A, 100), job(B, 110)) == [1, 2, 0]


def test_where_somebody_is_late_deadlines_are_a_little_later() -> None:
    """So that models still come once for all their jobs."""
    waiting = WaitingJobs([job(A, 5, 50), job(B, 100), job(C, 105)], {}, 0)
    assert STRICT.order(waiting, 0) == [1, 2, 0]
    assert POLICY.order(waiting, 0) == [0, 1, 2]
    assert POLICY.order(WaitingJobs([job(A, -360, 50), job(B, 100), job(C, 105)], {}, 0), 0) == [1, 2, 0]


def test_who_is_late_goes_with_others_of_its_model_where_nobody_minds() -> None:
    assert order(job(B, 5), job(B, 50), job(A, 100)) == [1, 0, 2]


def test_who_has_waited_the_longest_is_next_once_in_a_deadline() -> None:
    waiting = [job(A, 5), job(B, 200, arrival=20)]
    assert order(*waiting, now=99) == [1, 0]
    assert order(*waiting, now=100) == [0, 1]
    assert order(*waiting, now=150, relieved=60) == [1, 0]


def test_who_came_after_a_rest_has_not_waited_since_before_it() -> None:
    waiting = [job(A, 1100, arrival=1000), job(B, 1060, arrival=1010)]
    assert order(*waiting, now=1020) == [1, 0]


@pytest.mark.parametrize("policy", [POLICY, STRICT], ids=["graceful", "strict"])
@given(
    st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 40), st.integers(1, 40)), min_size=30, max_size=60),
    st.integers(0, 60),
)
def test_nobody_starves(policy: LeastSlackPrefill, arrivals: list[tuple[ModelId, int, int]], load: int) -> None:
    """Whatever comes later: a job with k before it runs within k + 1 deadlines, each with two loads and prefills."""
    now, relieved, at = 0, 0, 0
    coming, jobs = deque[PrefillJob](), list[PrefillJob]()
    for model, gap, prefill in arrivals:
        at += gap
        coming.append(job(model, at + TTFT, prefill, arrival=at))
    before: dict[int, int] = {}
    while coming or jobs:
        now = now if jobs else max(now, coming[0].ranked_ns)
        while coming and coming[0].ranked_ns <= now:
            before[id(coming[0])] = len(jobs)
            jobs.append(coming.popleft())
        waiting = WaitingJobs(jobs, dict.fromkeys((A, B, C), load), relieved)
        chosen = jobs[policy.order(waiting, now)[0]]
        assert now - chosen.ranked_ns <= (before[id(chosen)] + 1) * (TTFT + 2 * (load + 40))
        if chosen is min(jobs, key=lambda one: one.ranked_ns):
            relieved = now
        jobs = [one for one in jobs if one is not chosen]
        now += load + chosen.prefill_ns


# --- and why ----------------------------------------------------------------------------------------------------------


def why(*jobs: PrefillJob, load_ns: Mapping[ModelId, int] | None = None, now: int = 0) -> Why:
    waiting = WaitingJobs(jobs, load_ns or {}, 0)
    return STRICT.why_next(waiting, STRICT.order(waiting, now), now)


def test_who_is_next_is_explained_by_slack_cost_and_who_came_second() -> None:
    assert why(job(A, 100), job(B, 60), job(B, 90), load_ns={A: 20}) == Why(
        f"first of 3 in line, in a run of 2 (token due in 60 ns, prefill 10 ns); "
        f"then {A} (token due in 100 ns, prefill 10 ns, weights 20 ns)",
        slack_ns=50,
        cost_ns=10,
        lost=A,
        lost_slack_ns=70,
        lost_cost_ns=30,
    )


def test_who_would_starve_says_so() -> None:
    told = why(job(A, 5), job(B, 200, arrival=20), now=100)
    assert told.because.startswith("has waited the longest, 100 ns, and not been next in time")


def test_a_place_is_explained_by_when_it_begins_there() -> None:
    queues = Queues()
    queues.visit(Z, A)
    told = POLICY.why_group(Work(A, 10), queues.view, queues.place(A))
    assert told.because.startswith("home of its model; begins in 0 s, first token due in")
    assert (told.slack_ns, told.cost_ns, told.lost) == (10**12, 0, X)
    queues.join(Y, A)
    told = POLICY.why_group(Work(A, 10), queues.view, queues.place(A))
    assert told.because.startswith("others of its model are in line; ") and told.lost_cost_ns == SWITCH_NS
