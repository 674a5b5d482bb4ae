"""Noise of runs: how large it is, and what it leaves as it is."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, pstdev

import pytest

from aegis.core.ids import InstanceId
from aegis.sim.gpu_costs import GPUS
from aegis.sim.noise import RunNoise
from aegis.sim.step_costs import StepCosts
from bench.simulate.setting import Setting, run

WORKLOAD = "poisson:models=4,rps=0.4,duration=30"
SETTING = Setting(policy="serverlessllm", workload=WORKLOAD, mixed=2)


def factors(share: float, seed: int = 0, instance: str = "mixed-0", count: int = 4000) -> list[float]:
    noise = RunNoise(share, seed, InstanceId(instance))
    return [noise.factor_ppm() / 1e6 for _ in range(count)]


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2])
def test_factors_have_a_mean_of_one_and_the_deviation_that_was_asked_for(share: float) -> None:
    drawn = factors(share)
    assert mean(drawn) == pytest.approx(1, abs=4 * share / 4000**0.5)
    assert pstdev(drawn) == pytest.approx(share, rel=0.05)
    assert mean(abs(each - 1) <= share for each in drawn) == pytest.approx(0.68, abs=0.03)


def test_each_instance_and_each_seed_has_draws_of_its_own_and_no_run_takes_less_than_no_time() -> None:
    assert factors(0.1) == factors(0.1)
    assert factors(0.1) != factors(0.1, seed=1) and factors(0.1) != factors(0.1, instance="mixed-1")
    assert min(factors(1.0)) == 0.1


def test_all_of_a_runs_costs_are_scaled() -> None:
    costs = StepCosts.of_ms(decode=(8, 0.5, 0.25), prefill=(4, 20, 2), batch=1)
    twice = costs.scaled(2_000_000)
    assert twice == StepCosts.of_ms(decode=(16, 1, 0.5), prefill=(8, 40, 4), batch=2)
    assert costs.scaled(1_000_000) == costs
    assert type(replace(GPUS["h100"], nano_batches=True).fits["llama-2-13b"].scaled(900_000)) is StepCosts


def test_runs_differ_arrivals_do_not_and_the_same_seed_is_the_same() -> None:
    plain, noisy = run(SETTING), run(replace(SETTING, noise=0.1))
    assert [r.arrival_ns for r in plain.records] != []
    assert sorted((r.arrival_ns, r.output_tokens) for r in plain.records) == sorted(
        (r.arrival_ns, r.output_tokens) for r in noisy.records
    )
    assert noisy.records != plain.records
    assert run(replace(SETTING, noise=0.1)).records == noisy.records
    assert run(replace(SETTING, noise=0.0)).records == plain.records


def test_noise_averages_out_over_the_runs_of_a_market() -> None:
    def busy_ns(setting: Setting) -> int:
        return sum(span.stop_ns - span.start_ns for span in run(setting).spans if span.kind == "prefill")

    assert busy_ns(replace(SETTING, noise=0.1)) == pytest.approx(busy_ns(SETTING), rel=0.1)
    assert busy_ns(replace(SETTING, noise=0.1)) != busy_ns(SETTING)
