"""Every recipe, in a small simulation."""

from __future__ import annotations

import pytest

from aegis.core.model import Slo
from aegis.core.role import Roles
from aegis.policies import RECIPES, Recipe, recipe
from aegis.sim.gpu_costs import gpu
from aegis.sim.market import SimRequest
from aegis.sim.shapes import MIX, SHAPES
from aegis.sim.simulation import Outcome, Pool, simulate
from bench.workloads import spec
from bench.workloads.arrival import model_name
from tests.long_forms import first_of

MODELS, DURATION_S = 8, 30
SPECS = tuple(SHAPES[MIX[index]].spec(model_name(index), Slo()) for index in range(MODELS))
PUBLISHED = ("aegaeon", "serverlessllm", "serverlessllm-oracle-sjf", "muxserve")


def play(chosen: Recipe, *, decodes: int = 2, rps: float = 0.1) -> Outcome:
    """On three instances."""
    mixed = chosen.roles is not Roles.FIXED
    arrivals = spec.parse(f"poisson:models={MODELS},rps={rps},duration={DURATION_S},lengths=uniform,output=8-200", 0)
    wanted = [SimRequest(a.at_ns, a.model, a.input_tokens, a.output_tokens) for a in arrivals]
    counts = {"mixed": 1 + decodes} if mixed else {"prefills": 1, "decodes": decodes}
    outcome = simulate(Pool(gpu=gpu("h800"), specs=SPECS, recipe=chosen, **counts), wanted)
    assert len(outcome.records) == len(wanted)
    return outcome


def test_aegaeons_policy_on_mixed_instances_moves_no_kv() -> None:
    arrivals = [SimRequest(10**9 * (i // 4), SPECS[i % MODELS].model, 200, 100) for i in range(24)]
    outcome = simulate(Pool(recipe=recipe("aegaeon"), gpu=gpu("h800"), specs=SPECS, mixed=2), arrivals)
    assert set(outcome.counters) == {"mixed-0", "mixed-1"}
    assert {record.ended for record in outcome.records} == {"finished"}
    moved = sum(counters["swap_in_bytes"] + counters["swap_out_bytes"] for counters in outcome.counters.values())
    assert moved == 0 and sum(counters["prefills"] for counters in outcome.counters.values()) == len(arrivals)


def attained(outcome: Outcome) -> float:
    return sum(r.on_time for r in outcome.records) / sum(r.output_tokens for r in outcome.records)


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("dedicated", "muxserve")])
def test_who_switches_serves_all(name: str) -> None:
    outcome = play(recipe(name))
    assert {record.ended for record in outcome.records} == {"finished"}
    assert attained(outcome) > 0.95


@pytest.mark.parametrize(("name", "as_published", "places"), [("dedicated", False, 3), ("muxserve", True, 6)])
def test_models_without_a_place_fail_and_count_as_missed(name: str, as_published: bool, places: int) -> None:
    outcome = play(recipe(name, as_published=as_published), rps=0.2)
    served = {record.model for record in outcome.records if record.ended == "finished"}
    refused = {record.model for record in outcome.records if record.ended == "failed"}
    assert (len(served), len(refused)) == (places, MODELS - places) and not served & refused
    assert all(record.on_time == 0 for record in outcome.records if record.ended == "failed")
    assert all(counters["given_up"] == 0 for counters in outcome.counters.values())


@pytest.mark.parametrize("name", first_of(1, list(PUBLISHED)))
def test_as_published_attains_no_more(name: str) -> None:
    """Far more than three instances can do: where prefills wait for decodes some fail."""
    published, fixed = (play(recipe(name, as_published=p), rps=1.0) for p in (True, False))
    assert attained(published) < attained(fixed)
    assert any(record.ended == "failed" for record in published.records) == (recipe(name).roles is Roles.AUTO)


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_again(name: str) -> None:
    assert play(recipe(name)) == play(recipe(name))


def test_muxwise_as_published_has_a_profile_and_layers_and_nothing_of_another_artifact() -> None:
    known, published = recipe("muxwise"), recipe("muxwise", as_published=True)
    assert (published.profiled, published.by_layers) == (True, True) and not known.profiled and not known.by_layers
    assert (published.link_bytes_per_s, published.give_up_ns) == (None, None)
