"""The proxy's mirror of the prefill queues: always what looking through everything would find."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import Load, OpenGroup, PrefillCandidate, PrefillPlacement, Work
from aegis.sim.faults.fake_models import make_spec
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.routing.prefill_queues import PrefillQueues
from tests.unit.proxy.routing import naive_placement as naive

SPECS = [make_spec(i, image_pages=pages, block_bytes=1024) for i, pages in enumerate([1, 3, 40])]
MODELS = [spec.model for spec in SPECS]
A, B, _ = MODELS
INSTANCES = [InstanceId(name) for name in ("p-0", "p-1", "p-10", "p-2")]
I = INSTANCES[0]  # noqa: E741

models, instances = st.sampled_from(MODELS), st.sampled_from(INSTANCES)


def estimates() -> dict[ModelId, Latency]:
    return {spec.model: Latency(spec.manifest, Hardware()) for spec in SPECS}


def queues(max_group_size: int = 8) -> PrefillQueues:
    made = PrefillQueues(max_group_size, estimates())
    made.up(I)
    return made


def join(made: PrefillQueues, request: int, model: ModelId, *, tokens: int = 10, group: int | None = None) -> int:
    return made.add(PrefillPlacement(I, group), RequestId(request), Work(model, tokens))


class Prefills(RuleBasedStateMachine):
    """Requests, switches, instances and estimates that come and go; Algorithm 1 places the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = GroupedFcfs(max_group_size=3)
        self.latency = estimates()
        self.kept = PrefillQueues(self.policy.max_group_size, self.latency)
        self.naive: dict[InstanceId, naive.Queue] = {}
        self.placed: dict[RequestId, InstanceId] = {}
        self.home_of: dict[ModelId, InstanceId] = {}
        self.requests = 0

    @rule(instance=instances)
    def up_or_down(self, instance: InstanceId) -> None:
        if instance in self.naive:
            self.kept.down(instance)
            del self.naive[instance]
            self.placed = {r: i for r, i in self.placed.items() if i != instance}
            self.home_of = {m: i for m, i in self.home_of.items() if i != instance}
        else:
            self.kept.up(instance)
            self.naive[instance] = naive.Queue(instance)

    def expected(self, model: ModelId) -> PrefillPlacement:
        ordered = [queue for _, queue in sorted(self.naive.items())]
        return naive.algorithm_1(model, ordered, self.latency, self.policy.max_group_size)

    @precondition(lambda self: self.naive)
    @rule(model=models, tokens=st.integers(1, 4000), count=st.integers(1, 5))
    def arrive(self, model: ModelId, tokens: int, count: int) -> None:
        for _ in range(count):
            work = Work(model, tokens)
            chosen = self.policy.place(work, self.kept)
            self.requests += 1
            request = RequestId(self.requests)
            self.placed[request] = self.home_of[model] = chosen.instance
            assert self.kept.add(chosen, request, work) == self.naive[chosen.instance].add(
                request, model, tokens, chosen.group
            )

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), load_ns=st.integers(0, 10**10))
    def others(self, data: st.DataObject, load_ns: int) -> None:
        instance = data.draw(st.sampled_from(sorted(self.naive)))
        self.kept.set_foreign(instance, load_ns)
        own_ns, self.naive[instance].foreign_ns = self.kept.own_ns(instance), load_ns
        assert own_ns == naive.load_ns(self.naive[instance], self.latency) - load_ns

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.placed)))
        instance = self.placed.pop(request)
        self.kept.remove(instance, request)
        self.naive[instance].remove(request)

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), model=models)
    def switch(self, data: st.DataObject, model: ModelId) -> None:
        instance = data.draw(st.sampled_from(sorted(self.naive)))
        self.kept.switched(instance, model)
        self.naive[instance].running = model

    @rule(model=models, tokens=st.integers(1, 4000), factor=st.floats(0.1, 10))
    def observe(self, model: ModelId, tokens: int, factor: float) -> None:
        latency = self.latency[model]
        moved = latency.saw_prefill(tokens, round(factor * latency.prefill_ns(tokens)))
        if latency.saw_switch(round(factor * latency.switch_ns())) or moved:
            self.kept.reprice(model)

    @invariant()
    def loads_are_those_of_all_groups(self) -> None:
        loads = {instance: naive.load_ns(queue, self.latency) for instance, queue in self.naive.items()}
        assert self.kept.by_load == sorted(Load(load, instance) for instance, load in loads.items())
        assert all(self.kept.load_ns(instance) == load for instance, load in loads.items())

    @invariant()
    def open_groups_are_those_with_room(self) -> None:
        for model in MODELS:
            assert list(self.kept.open_groups(model)) == sorted(
                OpenGroup(queue.instance, group.number, group.size)
                for queue in self.naive.values()
                for group in queue.groups.values()
                if group.model == model and group.size < self.policy.max_group_size
            )
            assert list(self.kept.active_on(model)) == sorted(i for i, q in self.naive.items() if q.running == model)

    @rule(model=models)
    def forget(self, model: ModelId) -> None:
        for instance, queue in self.naive.items():
            of_it = [r for group in queue.groups.values() if group.model == model for r in group.waiting]
            for request in of_it:
                self.kept.remove(instance, request)
                queue.remove(request)
                del self.placed[request]
            queue.running = None if queue.running == model else queue.running
        self.kept.forget(model)
        self.home_of.pop(model, None)

    @invariant()
    def homes_are_where_the_last_requests_went(self) -> None:
        assert [self.kept.home(model) for model in MODELS] == [self.home_of.get(model) for model in MODELS]
        homes = list(self.home_of.values())
        assert self.kept.by_model_count == sorted(
            PrefillCandidate(homes.count(instance), instance) for instance in self.naive
        )

    @invariant()
    def the_decision_is_that_of_algorithm_1(self) -> None:
        for model in MODELS if self.naive else []:
            assert self.policy.place(Work(model, 1), self.kept) == self.expected(model)


TestPrefills = Prefills.TestCase


def test_a_groups_size_is_cumulative() -> None:
    """Running a job does not make room for another one (Aegaeon §4.2)."""
    made = queues(max_group_size=3)
    group = join(made, 1, A)
    assert join(made, 2, A, group=group) == group
    made.remove(I, RequestId(1))
    assert made.open_groups(A) == [OpenGroup(I, group, 2)]
    join(made, 3, A, group=group)
    made.remove(I, RequestId(2))
    assert made.open_groups(A) == []


def test_a_group_with_nobody_left_is_gone_and_its_number_is_not_used_again() -> None:
    made = queues()
    first = join(made, 1, A)
    made.remove(I, RequestId(1))
    assert made.open_groups(A) == [] and made.load_ns(I) == 0
    assert join(made, 2, A) != first


def test_removing_somebody_unknown_changes_nothing() -> None:
    made = queues()
    join(made, 1, A)
    before = made.by_load[0]
    made.remove(I, RequestId(9))
    assert made.by_load == [before]


@given(st.lists(st.tuples(models, st.integers(1, 4000)), max_size=20))
def test_a_load_is_the_sum_of_its_parts(jobs: list[tuple[ModelId, int]]) -> None:
    """Pricing many jobs at once rounds less, and nothing else."""
    made, latency, total, running = queues(), estimates(), 0, None
    for request, (model, tokens) in enumerate(jobs):
        join(made, request, model, tokens=tokens)
        total += latency[model].prefill_ns(tokens) + (latency[model].switch_ns() if model != running else 0)
        running = model
    assert made.load_ns(I) == pytest.approx(total, abs=len(jobs))
