"""Grouped first-come-first-served prefill (Aegaeon Algorithm 1). That it decides as the algorithm is written, whatever
happened before, is shown in tests/unit/proxy/routing/test_prefill_queues.py."""

from __future__ import annotations

from aegis.core.decision import Why
from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import PrefillPlacement, Work
from aegis.sim.faults.fake_models import make_spec
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.routing.prefill_queues import PrefillQueues

SPECS = [make_spec(i, image_pages=pages, block_bytes=128) for i, pages in enumerate([1, 1, 40])]
SMALL, OTHER, LARGE = (spec.model for spec in SPECS)
LATENCY = {spec.model: Latency(spec.manifest, Hardware()) for spec in SPECS}
SWITCH_NS = {model: latency.switch_ns() for model, latency in LATENCY.items()}
RUN_NS = LATENCY[SMALL].prefill_ns(10)
X, Y, Z = (InstanceId(name) for name in "xyz")


class Queues:
    """Of x, y and z; `join` fills them by hand."""

    def __init__(self, max_group_size: int = 8) -> None:
        self.policy = GroupedFcfs(max_group_size)
        self.view = PrefillQueues(max_group_size, LATENCY)
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

    def place(self, model: ModelId) -> PrefillPlacement:
        return self.policy.place(Work(model, 10), self.view)

    def why(self, model: ModelId) -> Why:
        return self.policy.why_group(Work(model, 10), self.view, self.place(model))


def test_a_group_of_the_same_model_with_room_comes_before_load() -> None:
    """Lines 5-8: even on the most loaded instance."""
    queues = Queues()
    queues.join(X, LARGE)
    queues.join(X, SMALL, jobs=7)
    assert queues.place(SMALL) == PrefillPlacement(X, 2)


def test_the_first_group_with_room_is_joined() -> None:
    queues = Queues()
    queues.join(Y, SMALL)
    queues.join(X, SMALL, jobs=8)
    queues.join(X, OTHER)
    queues.join(X, SMALL, jobs=3)
    queues.join(X, SMALL)
    assert queues.place(SMALL) == PrefillPlacement(X, 3)


def test_a_full_group_is_not_joined() -> None:
    """Line 6; its size is cumulative, so one job left of eight is as full as eight left."""
    queues = Queues()
    for request in queues.join(X, SMALL, jobs=8)[:7]:
        queues.view.remove(X, request)
    assert queues.place(SMALL) == PrefillPlacement(Y, None)
    larger = Queues(max_group_size=9)
    larger.join(X, SMALL, jobs=8)
    assert larger.place(SMALL) == PrefillPlacement(X, 1)


def test_a_new_group_goes_to_the_least_load() -> None:
    """Lines 9-13: load is time, not a number of groups or jobs."""
    queues = Queues()
    queues.join(X, LARGE)
    queues.join(Y, LARGE)
    queues.join(Y, OTHER)
    queues.view.switched(Z, OTHER)
    for _ in range(5):
        queues.join(Z, OTHER, jobs=2)
    assert [load.instance for load in queues.view.by_load] == [Z, X, Y]
    assert queues.place(SMALL) == PrefillPlacement(Z, None)


def test_equal_loads_are_told_apart_by_id() -> None:
    queues = Queues()
    assert queues.place(SMALL) == PrefillPlacement(X, None)
    for instance in (Z, Y, X):
        queues.join(instance, OTHER)
    assert queues.place(SMALL) == PrefillPlacement(X, None)


def test_load_counts_execution_and_every_switch() -> None:
    """Eq. 4 and 5: the running model needs no switch, a model that comes back does."""
    queues = Queues()
    assert queues.view.load_ns(X) == 0
    (first,) = queues.join(X, SMALL)
    assert queues.view.load_ns(X) == RUN_NS + SWITCH_NS[SMALL]
    queues.view.switched(X, SMALL)
    assert queues.view.load_ns(X) == RUN_NS
    (between,) = queues.join(X, LARGE)
    queues.join(X, SMALL)
    two_ns = LATENCY[SMALL].prefills_ns(2, 20, 200)
    large_ns = LATENCY[LARGE].prefill_ns(10)
    assert queues.view.load_ns(X) == two_ns + large_ns + SWITCH_NS[LARGE] + SWITCH_NS[SMALL]
    queues.view.remove(X, between)
    assert queues.view.load_ns(X) == two_ns
    queues.view.remove(X, first)
    assert queues.view.load_ns(X) == RUN_NS


def test_it_says_why() -> None:
    queues = Queues()
    queues.join(X, SMALL, jobs=7)
    assert queues.why(SMALL).because == "joins the first group of its model with room: 7 of 8"
    told = queues.why(OTHER)
    assert told.because.startswith("no group of its model has room; least work: 0 s, ") and told.lost == Z
