"""Harsh scenarios, each drawn from one seed: any policy on any pool, with too little of everything.

Arrivals far beyond what the instances can do; memory for hardly more than one model, or less than all instances want;
limits that move and trims; clients that leave; now and then instances that die, models that are removed and engines
that raise. Every model has deadlines of its own, every request a priority. With a plan of faults dying, removing and
raising is the plan's, and there is a model cache with room for some of the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from aegis.core.clock import NS_PER_MS
from aegis.core.model import ModelSpec, Slo
from aegis.core.request import PRIORITY_MAX
from aegis.core.rng import Stream
from aegis.core.role import Roles
from aegis.core.views import Renewal, TurnRules
from aegis.policies import RECIPES, Recipe, Site, published, recipe
from aegis.sim.faults.fake_models import PAGE, make_spec
from aegis.sim.faults.plan import Kind, draw_plan
from aegis.sim.faults.scenario import Scenario
from decode.policies.least_slack import LeastSlack
from decode.policies.weighted_round_robin import WeightedRoundRobin

T = TypeVar("T")

_TURNS = WeightedRoundRobin(q_max_ns=30 * NS_PER_MS)
_HALVES, _THIRDS = ((500, 500),), ((250, 750), (500, 500), (750, 250))
_BLOCK_BYTES = (32768, 65536, 98304, 131072, 262144, PAGE // 3 // 128 * 128, PAGE // 2, PAGE)


@dataclass(frozen=True, slots=True)
class Setup:
    """A scheduler on instances of these roles."""

    recipe: Recipe
    prefills: int
    decodes: int
    mixed: int

    def __str__(self) -> str:
        return f"{self.recipe.name}, {self.prefills} + {self.decodes} instances and {self.mixed} mixed"


def scenario_of(seed: int) -> tuple[Setup, Scenario]:
    """The scenario of a seed."""
    draw = Stream(seed, "harsh")
    setup = _setup(draw, most=2)
    return setup, _varied(seed, _scenario(draw, setup))


def _scenario(draw: Stream, setup: Setup) -> Scenario:
    instances = setup.prefills + setup.decodes + setup.mixed
    prompt_max, output_max = 4 + draw.below(90), 2 + draw.below(40)
    specs = tuple(_spec(draw, index) for index in range(1 + draw.below(8)))
    pages, slabs = _least(specs, instances, prompt_max + output_max)
    pages, slabs = pages + draw.below(_pick(draw, (2, 8, 64))), slabs + draw.below(_pick(draw, (2, 8, 64)))
    site = Site(memory_bytes=pages * PAGE, turns=_TURNS, left=lambda request: request * 7 % 31)
    return Scenario(
        specs=specs,
        pages=pages,
        host_slabs=slabs,
        prefills=setup.prefills,
        decodes=setup.decodes,
        mixed=setup.mixed,
        policy=setup.recipe.policy(site),
        prefill=setup.recipe.prefill(site),
        order=setup.recipe.order,
        requests=_pick(draw, (6, 12, 24)),
        deaths=draw.below(4) if draw.below(6) == 0 else 0,
        removals=draw.below(4) if draw.below(6) == 0 else 0,
        cancel_share=_pick(draw, (0.0, 0.1, 0.5)),
        failing_share=_pick(draw, (0.0, 0.0, 0.0, 0.02)),
        gap_ns=_pick(draw, (20_000, 500_000, 4_000_000)),
        jitter_ns=_pick(draw, (0, 200_000, 5_000_000)),
        prompt_max=prompt_max,
        output_max=output_max,
        moves=draw.below(8) if draw.below(3) == 0 else 0,
        priority_max=_pick(draw, (0, 1, PRIORITY_MAX)),
        patience_ns=_pick(draw, (1_000_000, 40_000_000)),
    )


def faulty_scenario_of(seed: int, kinds: frozenset[Kind]) -> tuple[Setup, Scenario]:
    """A larger market, where faults of these kinds happen."""
    draw = Stream(seed, "faulty")
    setup = _setup(draw, most=3)
    scenario = _scenario(draw, setup)
    images = sum(-(-spec.manifest.image_bytes // PAGE) for spec in scenario.specs)
    requests, gap_ns = _pick(draw, (8, 24, 48)), _pick(draw, (20_000, 2_000_000, 12_000_000))
    scenario = replace(
        scenario,
        requests=requests,
        gap_ns=gap_ns,
        give_up_ns=_pick(draw, (None, None, 100 * NS_PER_MS)),
        jitter_ns=_pick(draw, (0, 1_000_000, 20_000_000)),
        cache_extents=_pick(draw, (0, 1 + draw.below(images), images)),
        deaths=0,
        removals=0,
        failing_share=0.0,
        plan=draw_plan(seed, kinds, requests * gap_ns // 2 + 100 * NS_PER_MS),
    )
    return setup, _varied(seed, scenario)


def _varied(seed: int, scenario: Scenario) -> Scenario:
    """What was thought of later, so that what else is drawn is drawn as it would be."""
    return _refusing(seed, _reusing(seed, _divided(seed, _pausing(seed, scenario))))


def _refusing(seed: int, scenario: Scenario) -> Scenario:
    """In a third of them whom there is no time for is refused, by deadlines that are soon over."""
    draw = Stream(seed, "refusals")
    if draw.below(3):
        return scenario
    ttft_ns = _pick(draw, (5, 20, 100)) * NS_PER_MS
    specs = [
        msgspec.structs.replace(spec, slo=msgspec.structs.replace(spec.slo, ttft_ns=ttft_ns)) for spec in scenario.specs
    ]
    return replace(scenario, specs=tuple(specs), refuses=True)


def _pausing(seed: int, scenario: Scenario) -> Scenario:
    """The gap targets of models, from less than a step to what stops nothing."""
    draw = Stream(seed, "gaps")
    specs = [
        msgspec.structs.replace(
            spec, slo=msgspec.structs.replace(spec.slo, gap_ns=_pick(draw, (1, 4, 12, 500)) * NS_PER_MS)
        )
        for spec in scenario.specs
    ]
    return replace(scenario, specs=tuple(specs))


def _divided(seed: int, scenario: Scenario) -> Scenario:
    """The devices of every other market can be divided."""
    draw = Stream(seed, "lanes")
    return replace(scenario, lane_shares=_pick(draw, ((), (), _HALVES, _THIRDS)))


def _reusing(seed: int, scenario: Scenario) -> Scenario:
    """Every other market reuses KV."""
    draw = Stream(seed, "reuse")
    if not draw.below(2):
        return scenario
    return replace(
        scenario,
        reuses=True,
        alike=1 + draw.below(2),
        requests=24,
        gap_ns=_pick(draw, (scenario.gap_ns, 20 * NS_PER_MS, 60 * NS_PER_MS)),
    )


def _setup(draw: Stream, *, most: int) -> Setup:
    """Every other one is `least-slack`. Of a role there are at most so many instances."""
    count = 1 + draw.below(3)
    split = (1 + draw.below(most), 1 + draw.below(most))
    if draw.below(2):
        ours = _cutting() if draw.below(4) == 0 else recipe("least-slack")
        roles = _pick(draw, ((0, 0, count), (*split, 0), (1, 1, 1)))
        return Setup(ours, *roles)
    name = _pick(draw, tuple(RECIPES))
    other = recipe(name, as_published=published(name) and draw.below(2) == 0)
    mixed = other.roles is not Roles.FIXED or draw.below(3) == 0
    return Setup(other, 0, 0, count) if mixed else Setup(other, *split, 0)


def _cutting() -> Recipe:
    """Ours, with every prefill cut as short as the policy finds it worth."""
    rules = TurnRules(renewal=Renewal.ARRIVAL, chunk_tokens=16, defers_refused=True)
    return replace(
        recipe("least-slack"),
        name="least-slack (chunks)",
        policy=lambda site: LeastSlack(rules=rules),
    )


def _spec(draw: Stream, index: int) -> ModelSpec:
    slo = Slo(_pick(draw, (5, 40, 400)) * NS_PER_MS, _pick(draw, (1, 5, 30)) * NS_PER_MS)
    return make_spec(index, image_pages=1 + draw.below(6), block_bytes=_pick(draw, _BLOCK_BYTES), slo=slo)


def _least(specs: Sequence[ModelSpec], instances: int, tokens: int) -> tuple[int, int]:
    """Pages and host slabs without which the longest sequence of some model could not be served."""
    slabs = [-(-tokens // (PAGE // spec.manifest.kv.block_bytes * spec.manifest.kv.block_tokens)) for spec in specs]
    pages = [spec.manifest.image_bytes // PAGE + 1 + count for spec, count in zip(specs, slabs, strict=True)]
    return max(pages), max(slabs) + instances - 1


def _pick(draw: Stream, choices: Sequence[T]) -> T:
    return choices[draw.below(len(choices))]
