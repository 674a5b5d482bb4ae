"""Calibration finds the costs that a simulation was given in the simulation's spans and records."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import yaml

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.policies import recipe
from aegis.sim.gpu_costs import GpuSpec, gpu
from aegis.sim.market import SimRequest
from aegis.sim.shapes import SHAPES
from aegis.sim.simulation import Outcome, Pool, simulate
from aegis.sim.step_costs import StepCosts
from aegis.telemetry.spans import SpanKind
from bench.calibration.rates import measure_rates
from bench.calibration.steps import fit_steps
from bench.calibration.suite import written
from bench.workloads.spec import parse
from tests.long_forms import first_of

NAMES = tuple(ModelId(f"m{n:03}") for n in range(4))
COSTS = StepCosts.of_ms(decode=(3.0, 0.5, 0.4), prefill=(5.0, 40.0, 20.0), batch=0.6)
WORKLOAD = "poisson:models=4,rps=0.8,duration=60,lengths=uniform,input=16-1200,output=4-120"


def machine(contention: int) -> GpuSpec:
    return replace(
        gpu("h100"),
        fits=dict.fromkeys(NAMES, COSTS),
        switch_ns=200_000,
        run_ns=400_000,
        copy_ns=30_000,
        handover_ns=1_000_000,
        contention=contention,
    )


@cache
def outcome(contention: int, workload: str = WORKLOAD, noise: float = 0.0) -> Outcome:
    """A prefill and a decode instance on one device, with memory for all the models."""
    pool = Pool(
        recipe=recipe("aegaeon"),
        gpu=machine(contention),
        specs=tuple(SHAPES["qwen2.5-7b"].spec(name, Slo()) for name in NAMES),
        prefills=1,
        decodes=1,
        devices=1,
        slab_bytes=64 << 20,
        keep_spans=True,
        noise=noise,
    )
    arrivals = parse(workload, 1)
    return simulate(pool, [SimRequest(a.at_ns, a.model, a.input_tokens, a.output_tokens) for a in arrivals])


@pytest.mark.parametrize("workload", first_of(1, [WORKLOAD, "grid:models=4"]))
@pytest.mark.parametrize("contention", first_of(1, [1_500, 700, 0]))
def test_steps_and_contention(contention: int, workload: str) -> None:
    found, fits = fit_steps(outcome(contention, workload).spans)
    assert found == pytest.approx(contention / 1e3, abs=0.03)
    for name in NAMES:
        assert fits[name].decode[:3] == pytest.approx((3e6, 500, 4e5), rel=0.05)
        assert fits[name].decode[3] == pytest.approx(6e5, abs=1e5)  # 2 % of a step
        assert fits[name].prefill == pytest.approx((5e6, 4e4, 20), rel=0.05)
        assert min(fits[name].decode_quality.r2, fits[name].prefill_quality.r2) > 0.99


@pytest.mark.parametrize("noise", first_of(1, [0.1, 0.0]))
def test_noise(noise: float) -> None:
    seen = outcome(0, noise=noise)
    _, fits = fit_steps(seen.spans)
    content = yaml.safe_load(written(0, fits, measure_rates(seen.spans, seen.records)))
    assert content.get("noise", 0.0) == pytest.approx(noise, rel=0.2, abs=0.01)


def test_rates() -> None:
    seen = outcome(0, WORKLOAD.replace("rps=0.8", "rps=1.5"))  # models change without waiting for weights
    rates = measure_rates(seen.spans, seen.records)
    assert rates.to_device
    assert rates.to_device.bytes_per_s == pytest.approx(machine(0).in_bytes_per_s, rel=0.1)
    assert rates.run_ns == pytest.approx(400_000, rel=0.1)
    assert rates.switch_ns == pytest.approx(200_000, rel=0.25)
    assert rates.message_ns == pytest.approx(500_000, rel=0.1)


def test_runs_beside_others_cost_time_and_no_token() -> None:
    alone, beside = outcome(0), outcome(1_500)
    assert [r.output_tokens for r in alone.records] != []
    assert {r.request for r in alone.records if r.ended == "finished"} == {
        r.request for r in beside.records if r.ended == "finished"
    }
    assert _at_work_ns(beside) > 1.05 * _at_work_ns(alone)


def _at_work_ns(outcome: Outcome) -> int:
    runs = (SpanKind.PREFILL, SpanKind.DECODE)
    return sum(span.stop_ns - span.start_ns for span in outcome.spans if span.kind in runs)
