"""Lengths: the published statistics of ShareGPT, and the scales and ranges asked for."""

from __future__ import annotations

from statistics import fmean, quantiles

import pytest

from aegis.core.rng import Stream
from bench.workloads.lengths import OUTPUT_MIN, scaled, sharegpt, uniform

DRAWS = 60_000
# Mean, p50, p90, p99 of the 13,161 lengths that the public Aegaeon artifact draws from ShareGPT.
INPUT = (699.7, 563, 1567, 2174)
OUTPUT = (297.4, 266, 589, 957)


def statistics(lengths: list[int]) -> tuple[float, ...]:
    cuts = quantiles(lengths, n=100)
    return fmean(lengths), cuts[49], cuts[89], cuts[98]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[int, int]]:
    draws = Stream(1, "lengths")
    return [sharegpt(draws) for _ in range(DRAWS)]


def test_sharegpt_has_the_published_statistics(pairs: list[tuple[int, int]]) -> None:
    inputs, outputs = map(list, zip(*pairs, strict=True))
    assert statistics(inputs) == pytest.approx(INPUT, rel=0.03)
    assert statistics(outputs) == pytest.approx(OUTPUT, rel=0.03)
    assert min(outputs) == OUTPUT_MIN
    assert min(inputs) >= 1


@pytest.mark.parametrize(("low", "high", "mean"), [(1, 114, 311), (114, 479, 245), (479, 777, 292), (777, 99999, 317)])
def test_outputs_depend_on_inputs_as_published(pairs: list[tuple[int, int]], low: int, high: int, mean: float) -> None:
    """The mean output of the inputs in [low, high), in the same 13,161 lengths."""
    assert fmean(output for input_, output in pairs if low <= input_ < high) == pytest.approx(mean, rel=0.03)


def test_scaled_lengths_are_multiples() -> None:
    plain, twice = Stream(1), Stream(1)
    lengths = scaled(sharegpt, 2, 0.001)
    for _ in range(100):
        assert lengths(twice) == (2 * sharegpt(plain)[0], 1)


def test_uniform_lengths_reach_both_ends() -> None:
    draws, lengths = Stream(1), uniform(range(3, 6), range(7, 8))
    assert {lengths(draws) for _ in range(100)} == {(3, 7), (4, 7), (5, 7)}
