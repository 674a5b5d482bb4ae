"""Users change deadlines in the middle of everything that goes wrong, in markets with adapters whose cores explain what
they do, and whose steps hold few prompt tokens: no law breaks, and nothing is left of requests that have ended."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from aegis.core.clock import NS_PER_MS
from aegis.core.messages import SetSlo
from aegis.core.model import Slo
from aegis.core.rng import Stream
from aegis.sim.faults import world as worlds
from aegis.sim.faults.fake_models import make_adapter
from aegis.sim.faults.fault_injection import FaultInjector
from aegis.sim.faults.laws import check_end
from aegis.sim.faults.plan import EVERY
from aegis.sim.faults.random_scenarios import faulty_scenario_of
from aegis.sim.faults.scenario import Scenario
from aegis.sim.faults.world import World
from decode.core import DecodeCore
from decode.policies.least_slack import LeastSlack
from prefill.core import PrefillCore
from proxy.routing.events import SloSet
from proxy.routing.router import Router
from tests.long_forms import first_of


class ExplainingDecodeCore(DecodeCore):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, explains=True, **options)


class ExplainingPrefillCore(PrefillCore):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, explains=True, step_tokens=64, **options)


def scenario_of(seed: int, draw: Stream) -> Scenario:
    _, scenario = faulty_scenario_of(seed, EVERY)
    bases = scenario.specs
    adapters = [make_adapter(i, bases[draw.below(len(bases))]) for i in range(draw.below(5))]
    policy = scenario.policy
    if isinstance(policy, LeastSlack):
        step_tokens = (None, 8, 40)[draw.below(3)]
        policy = replace(policy, rules=replace(policy.rules, step_tokens=step_tokens, max_batch=2 + draw.below(8)))
    return replace(
        scenario,
        specs=(*bases, *adapters),
        pages=scenario.pages + bool(adapters),
        policy=policy,
        decode_core=ExplainingDecodeCore,
        prefill_core=ExplainingPrefillCore,
    )


def change(world: World, number: int, slo: Slo) -> None:
    """As a user does: of a base, all that is there hears of it."""
    bases = sorted(model for model, spec in world.models.specs.items() if spec.base is None)
    if bases:
        model = bases[number % len(bases)]
        world.models.specs[model] = replaced(world.models.specs[model], slo=slo)
        world.inform(SloSet(model, slo))
        for instance in world.up():
            world.post(instance, SetSlo(model, slo))


def schedule_changes(world: World, draw: Stream, span_ns: int) -> None:
    for _ in range(draw.below(12)):
        ttft_ms, tbt_ms, gap_ms = (5, 40, 400)[draw.below(3)], (1, 5, 30)[draw.below(3)], (1, 12, 500)[draw.below(3)]
        slo = Slo(ttft_ms * NS_PER_MS, tbt_ms * NS_PER_MS, gap_ms * NS_PER_MS)
        world.state.after(draw.below(span_ns), partial(change, world, draw.below(1000), slo))


def check_nothing_is_left(router: Router) -> None:
    assert not router._sessions and not router._handles and not router._moves and not router._first_tokens._places
    assert not any(paced.streams for paced in router.admission._pace._paced.values())
    assert not any(router.admission._more.values())
    assert not any(known.models or known.held for known in router._decodes._lists.values())
    assert not any(queue.jobs or queue.groups or queue.load_ns for queue in router._prefills._queues.values())


@pytest.mark.parametrize("seed", first_of(12, range(150)))
def test_no_law_breaks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "Router", partial(Router, explains=True))
    draw = Stream(seed, "changes")
    world = World(scenario_of(seed, draw), seed)
    span_ns = world.schedule()
    FaultInjector(world).schedule(span_ns)
    schedule_changes(world, draw, span_ns)
    world.run()
    check_end(world)
    check_nothing_is_left(world.router)
