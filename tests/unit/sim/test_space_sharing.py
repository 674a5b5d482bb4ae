"""Prism and the static rivals of its evaluation, in simulations of one device and of two."""

from __future__ import annotations

import pytest

from aegis.core.clock import NS_PER_S
from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.policies import recipe
from aegis.sim.gpu_costs import gpu
from aegis.sim.market import SimRequest
from aegis.sim.shapes import SHAPES
from aegis.sim.simulation import Outcome, Pool, simulate
from bench.simulate.setting import Setting, pool_of

LARGE, SMALL = (SHAPES[shape].spec(ModelId(shape), Slo()) for shape in ("llama-2-13b", "qwen2.5-7b"))


def play(policy: str, arrivals: list[SimRequest], *, mixed: int = 1) -> Outcome:
    known = recipe(policy)
    pool = Pool(gpu=gpu("h800"), specs=(LARGE, SMALL), recipe=known, mixed=mixed)
    outcome = simulate(pool, arrivals)
    assert {record.ended for record in outcome.records} == {"finished"}
    return outcome


def moved_out(outcome: Outcome) -> int:
    return sum(counters["swap_out_bytes"] for counters in outcome.counters.values())


@pytest.mark.parametrize("policy", ["s-partition", "muxserve++", "prism"])
def test_only_a_static_part_is_too_small_where_another_model_has_left_memory_unused(policy: str) -> None:
    """The KV of 130 prompts, in three batches, takes 21 GB of the 34 GB that both models' weights leave."""
    arrivals = [SimRequest(0, SMALL.model, 10, 2)]
    arrivals += [SimRequest(NS_PER_S + i, LARGE.model, 200, 50) for i in range(130)]
    assert (moved_out(play(policy, arrivals)) > 0) == (policy == "s-partition")


@pytest.mark.parametrize(("policy", "pause_s", "loads"), [("prism", 30, 1), ("prism", 60, 2), ("muxserve++", 60, 1)])
def test_weights_leave_after_45_s_without_a_request_under_prism_only(policy: str, pause_s: int, loads: int) -> None:
    last = SimRequest(70 * NS_PER_S, LARGE.model, 100, 2)  # placement looks on as long as there are requests
    arrivals = [SimRequest(at_s * NS_PER_S, SMALL.model, 100, 2) for at_s in (0, pause_s)]
    outcome = play(policy, [*arrivals, last])
    assert len([each for each in outcome.switches if each.model == SMALL.model]) == loads


def test_models_move_under_prism_unless_told_otherwise() -> None:
    workload = "poisson:models=4,rps=0.1,duration=20"
    assert pool_of(Setting(policy="prism", workload=workload)).recipe.placement
    assert not pool_of(Setting(policy="prism", workload=workload, placement="none")).recipe.placement
    assert not pool_of(Setting(policy="muxserve++", workload=workload)).recipe.placement
    made = pool_of(Setting(policy="prism", workload=workload, placement_rules=(("idle_ns", 7),))).recipe.placement
    assert made and made(None).rules.idle_ns == 7  # type: ignore[arg-type]


def test_static_rivals_know_the_mean_rates_of_a_workload_and_models_their_own_deadlines() -> None:
    workload = "poisson:models=2,rps=1,duration=200,lengths=fixed,input=30,output=70"
    pool = pool_of(Setting(policy="s-partition", workload=workload, slos=((ModelId("m001"), Slo(ttft_ns=7)),)))
    assert sorted(pool.rates) == ["m000", "m001"] and all(80 < rate < 120 for rate in pool.rates.values())
    assert [spec.slo.ttft_ns for spec in pool.specs] == [Slo().ttft_ns, 7]
    assert not pool_of(Setting(policy="prism", workload=workload)).rates
