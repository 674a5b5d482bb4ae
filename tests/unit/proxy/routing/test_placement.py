"""Placement's core: wishes of a policy are held against time and costs, and moves come one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from aegis.core.clock import NS_PER_S
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId
from proxy.policies.pressure import Pressure
from proxy.routing.events import ModelMoved, MoveModel, PlacesSet
from proxy.routing.placement import LOOK_NS, Effect, Evict, Placement, PoolSampled
from proxy.routing.placement_views import Change, InstanceView, PlacedLoad, PlacementRules, PlacementView
from proxy.routing.pool_sample import ModelSample

A, B = ModelId("a"), ModelId("b")
ONE, TWO = InstanceId("mixed-0"), InstanceId("mixed-1")
SAMPLE = ModelSample(A, 1000, 10, 10**8, 0, 0, 10**6, 10**9)
MOVE = Change(A, (TWO,), moves=True, because="so", source=ONE)


@dataclass
class Wishes:
    """A policy that wants what the test says."""

    rules: PlacementRules
    wanted: Sequence[Change] = ()
    views: list[PlacementView] = field(default_factory=list)

    def changes(self, view: PlacementView) -> Sequence[Change]:
        self.views.append(view)
        return self.wanted


class Pool:
    """A sample every second, of the same pool unless the test changes it."""

    def __init__(self, *wanted: Change, **rules: int | None) -> None:
        self.policy = Wishes(PlacementRules(**rules), wanted)  # type: ignore[arg-type]
        self.core = Placement(self.policy, Hardware(copy_bytes_per_s=1000.0))
        self.now_ns = 5 * NS_PER_S
        self.models = [SAMPLE]
        self.loads: dict[InstanceId, tuple[PlacedLoad, ...]] = {ONE: (PlacedLoad(A, 2, 50, 0, 0, 0),), TWO: ()}

    def look(self, seconds: int = 1) -> list[Effect]:
        effects: list[Effect] = []
        for _ in range(seconds):
            self.now_ns += LOOK_NS
            views = [InstanceView(name, (at,), 10**6, loads) for at, (name, loads) in enumerate(self.loads.items())]
            effects += self.core.on(PoolSampled(tuple(self.models), tuple(views)), self.now_ns)
        return effects

    def moved(self, why: str = "") -> None:
        """One that failed is forgotten everywhere."""
        assert self.core.on(ModelMoved(A, TWO, 1, 0, why), self.now_ns) == ([PlacesSet(A, ())] if why else [])


def test_what_is_wanted_is_done() -> None:
    assert Pool(MOVE).look() == [MoveModel(A, TWO, ONE, (TWO,))]
    assert Pool(Change(A, (ONE, TWO), moves=False, because="so")).look() == [PlacesSet(A, (ONE, TWO))]


def test_a_part_of_a_model_moves_and_costs_its_part() -> None:
    part = replace(MOVE, places=(TWO, ONE), share_ppm=400_000)
    assert Pool(part).look() == [MoveModel(A, TWO, ONE, (TWO, ONE), 400_000)]
    costs_ppm = 1_000_000 * (1000 + 2 * 20 * 10) // 1000 // 60  # 20 of its tokens, by a link of 1 000 bytes/s
    assert Pool(replace(part, gain_ppm=costs_ppm)).look() == []
    assert len(Pool(replace(part, gain_ppm=costs_ppm + 1)).look()) == 1


def test_a_change_is_made_when_it_was_wanted_for_long_without_a_break() -> None:
    pool = Pool(MOVE, held_ns=3 * NS_PER_S)
    assert pool.look(3) == []
    pool.policy.wanted = ()
    assert pool.look() == []
    pool.policy.wanted = (MOVE,)
    assert pool.look(3) == [] and pool.look() == [MoveModel(A, TWO, ONE, (TWO,))]


def test_another_wish_waits_anew() -> None:
    pool = Pool(MOVE, held_ns=2 * NS_PER_S)
    assert pool.look(2) == []
    pool.policy.wanted = (replace(MOVE, places=(ONE,)),)
    assert pool.look(2) == [] and len(pool.look()) == 1


def test_a_move_pays_for_itself_or_is_not_made() -> None:
    """Its weights and, out and in, its KV take 2 s: (1000 + 2 * 50 * 10) / 1000."""
    assert Pool(replace(MOVE, gain_ppm=300_000), window_ns=10 * NS_PER_S).look()
    assert not Pool(replace(MOVE, gain_ppm=199_999), window_ns=10 * NS_PER_S).look()
    assert Pool(MOVE, window_ns=1).look(), "the policy has weighed it"


def test_one_model_moves_at_a_time_and_then_none_for_a_while() -> None:
    """L1."""
    pool = Pool(MOVE, settled_ns=5 * NS_PER_S)
    assert len(pool.look()) == 1 and pool.look(100) == []
    pool.moved()
    assert pool.look(4) == [] and len(pool.look()) == 1


def test_requests_that_only_come_elsewhere_are_not_waited_for() -> None:
    pool = Pool(MOVE)
    assert len(pool.look()) == 1
    pool.policy.wanted = (MOVE, Change(B, (ONE,), moves=False, because="so"))
    pool.models.append(replace(SAMPLE, model=B))
    assert pool.look() == [PlacesSet(B, (ONE,))]


def test_places_are_those_that_were_set_as_long_as_they_are_up_else_where_requests_are() -> None:
    pool = Pool()
    pool.look()
    assert pool.policy.views[-1].models[A].places == (ONE,)
    pool.policy.wanted = (MOVE,)
    pool.look()
    pool.look()
    assert pool.policy.views[-1].models[A].places == (TWO,), "it is on its way"
    pool.moved("mixed-1 was lost")
    pool.look()
    assert pool.policy.views[-1].models[A].places == (ONE,)


def test_rates_are_those_of_the_window() -> None:
    """2 requests make a token each every 0.1 s, and prompts of 300 tokens came within 3 s."""
    pool = Pool(window_ns=3 * NS_PER_S)
    pool.look(10)
    for _ in range(3):
        sample = pool.models[0]
        pool.models[0] = replace(sample, requests=sample.requests + 1, prompt_tokens=sample.prompt_tokens + 100)
        pool.look()
    model = pool.policy.views[-1].models[A]
    assert model.tokens_per_s == 100 + 20
    assert model.prefill_ppm == (3 * 10**6 + 300 * 10**3) * 10**6 // (3 * NS_PER_S)
    pool.look(3)
    assert pool.policy.views[-1].models[A].tokens_per_s == 20


def test_requests_are_averaged_over_the_window() -> None:
    """A burst that is over, and one that has just begun: half of the time, a token every TBT of each of four."""
    pool = Pool(window_ns=4 * NS_PER_S)
    for requests in (4, 0, 0, 4, 4):
        pool.loads = {ONE: (PlacedLoad(A, requests, 50, 0, 0, 0),) if requests else (), TWO: ()}
        pool.look()
    assert pool.policy.views[-1].models[A].tokens_per_s == 4 * 10 / 2


def test_where_the_pool_is_not_known_nothing_is_decided() -> None:
    pool = Pool(MOVE)
    assert pool.core.on(PoolSampled((), ()), pool.now_ns) == [] and not pool.policy.views


def test_a_moment_in_which_the_pool_is_not_known_changes_nothing() -> None:
    """Neither how much comes for a model, nor where it was placed, nor since when nobody has asked for it."""
    pool = Pool(Change(A, (TWO,), moves=False, because="so"), window_ns=10 * NS_PER_S, idle_ns=9 * NS_PER_S)
    pool.look(5)
    assert pool.core.on(PoolSampled((), ()), pool.now_ns) == []
    pool.look()
    seen = pool.policy.views[-1].models[A]
    assert seen.tokens_per_s == 20 and seen.places == (TWO,)
    pool.policy.wanted, pool.loads = (), {ONE: (), TWO: ()}
    assert pool.look(5) == [] and pool.core.on(PoolSampled((), ()), pool.now_ns) == []
    assert pool.look(4) == [Evict(A, ONE), Evict(A, TWO), PlacesSet(A, ())]


def test_a_model_that_comes_back_counts_from_then() -> None:
    pool = Pool(window_ns=10 * NS_PER_S)
    pool.models = [replace(SAMPLE, requests=50, prompt_tokens=5000)]
    pool.look(5)
    pool.models = []
    pool.look()
    pool.models = [SAMPLE]
    pool.look(5)
    assert 0 <= pool.policy.views[-1].models[A].tokens_per_s <= 20


def test_weights_of_a_model_that_nobody_asks_for_leave() -> None:
    pool = Pool(idle_ns=5 * NS_PER_S)
    pool.look(20)
    pool.loads = {ONE: (), TWO: (PlacedLoad(A, 1, 5, 0, 0, 0),)}
    pool.look()
    pool.loads = {ONE: (), TWO: ()}
    assert pool.look(4) == [] and pool.look() == [Evict(A, ONE), Evict(A, TWO)]
    assert pool.look(50) == [], "once"
    pool.models[0] = replace(SAMPLE, requests=1)
    assert pool.look(5) == [] and len(pool.look()) == 2, "one came and went between two looks"


def test_by_default_they_stay() -> None:
    pool = Pool()
    pool.look()
    pool.loads = {ONE: (), TWO: ()}
    assert pool.look(1000) == []


def test_without_a_policy_nothing_moves_and_idle_models_leave_where_that_is_wanted() -> None:
    pool = Pool()
    for core, evicted in (
        (Placement(None, Hardware(), idle_ns=3 * NS_PER_S), [Evict(A, ONE), Evict(A, TWO)]),
        (Placement(None, Hardware()), []),
    ):
        pool.core, pool.loads = core, {ONE: (), TWO: ()}
        assert pool.look(10) == evicted


def test_a_model_that_is_evicted_has_no_home() -> None:
    pool = Pool(Change(A, (TWO,), moves=False, because="so"), idle_ns=5 * NS_PER_S)
    pool.look()
    pool.policy.wanted, pool.loads = (), {ONE: (), TWO: ()}
    assert pool.look(6) == [Evict(A, ONE), Evict(A, TWO), PlacesSet(A, ())]


def test_a_model_that_was_removed_is_forgotten() -> None:
    pool = Pool(Change(A, (TWO,), moves=False, because="so"))
    pool.look()
    pool.models, pool.policy.wanted = [], ()
    pool.look()
    pool.models = [SAMPLE]
    pool.look()
    assert pool.policy.views[-1].models[A].places == (ONE,)


def test_our_policy_relieves_a_device_that_has_no_time() -> None:
    """From samples to the order, and not before it has been so for a second. What comes after it goes where the
    scheduler says."""
    core = Placement(Pressure(), Hardware())
    sample = replace(SAMPLE, weight_bytes=10)
    models = tuple(replace(sample, model=ModelId(name)) for name in "ab")
    loads = tuple(PlacedLoad(ModelId(name), 1, 9, 600_000, 0, 0) for name in "ab")
    views = (InstanceView(ONE, (0,), 10**6, loads), InstanceView(TWO, (1,), 10**6, ()))
    done = [core.on(PoolSampled(models, views), second * NS_PER_S) for second in range(5)]
    assert done == [[], [MoveModel(A, TWO, ONE, (TWO,))], [], [], []] and "120 %" in core.because
    assert core.on(ModelMoved(A, TWO, 1, 0, ""), 5 * NS_PER_S) == [PlacesSet(A, ())]
