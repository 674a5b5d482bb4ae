"""The public Aegaeon artifact's generator: capped draws, a lower rate."""

from __future__ import annotations

from aegis.core.rng import Stream
from bench.workloads.arrival_processes import Artifact, Poisson


def counts(workload: Artifact, models: int) -> list[int]:
    return [len(list(workload.times_ns(model, Stream(1, model)))) for model in range(models)]


def test_no_model_makes_more_calls_than_the_mean() -> None:
    assert max(counts(Artifact(rps=0.1, duration_s=120), 200)) == 12


def test_its_rates_are_those_of_its_published_inputs() -> None:
    """0.084 to 0.088 where 0.1 is asked for, 0.45 to 0.46 for 0.5: its inputs for 16 to 80 models."""
    models = 2000
    assert 0.084 < sum(counts(Artifact(rps=0.1, duration_s=120), models)) / 120 / models < 0.090
    assert 0.45 < sum(counts(Artifact(rps=0.5, duration_s=60), models)) / 60 / models < 0.47


def test_it_is_poisson_up_to_the_cap() -> None:
    for model in range(20):
        capped = list(Artifact(rps=0.1, duration_s=120).times_ns(model, Stream(1, model)))
        assert capped == list(Poisson(rps=0.1, duration_s=120).times_ns(model, Stream(1, model)))[:12]
