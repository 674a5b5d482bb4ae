"""Distributions: the moments they should have, and functions as exact as the C library's."""

from __future__ import annotations

import math
from statistics import fmean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.rng import Stream
from bench.workloads.draws import exp, exponential, gamma, ln, normal
from tests.long_forms import first_of


@given(st.floats(5e-324, 1e308))
def test_ln_is_the_logarithm(x: float) -> None:
    assert abs(ln(x) - math.log(x)) <= 4e-16 * max(1, abs(math.log(x)))


@given(st.floats(-760, 700))
def test_exp_is_the_exponential(x: float) -> None:
    assert math.isclose(exp(x), math.exp(x), rel_tol=2e-13, abs_tol=1e-300)


def test_the_last_bits_are_the_same_on_every_machine() -> None:
    bits = ["-0x1.26bb1bbb55515p+1", "0x1.62e42fefa39efp-1", "0x1.193ea7aad030ap+0"]
    assert [ln(x).hex() for x in (0.1, 2.0, 3.0)] == bits
    bits = ["0x1.cf46d99d52b3ap-1", "0x1.5bf0a8b14576ap+1", "0x1.1bb7015e84d3dp+15"]
    assert [exp(x).hex() for x in (-0.1, 1.0, 10.5)] == bits
    assert exp(-1e9) == 0


@pytest.mark.parametrize("shape", first_of(2, [0.1, 0.5, 1.0, 7.3]))
def test_gamma_has_its_mean_and_variance(shape: float) -> None:
    draws = Stream(1, "gamma")
    sample = [gamma(draws, shape) for _ in range(40_000)]
    assert fmean(sample) == pytest.approx(shape, rel=0.05)
    assert pvariance(sample) == pytest.approx(shape, rel=0.08)
    assert min(sample) >= 0


def test_exponential_and_normal_have_their_moments() -> None:
    draws = Stream(1, "moments")
    sample = [exponential(draws) for _ in range(40_000)]
    assert (fmean(sample), pvariance(sample)) == (pytest.approx(1, rel=0.02), pytest.approx(1, rel=0.04))
    assert sum(x > 2 for x in sample) / 40_000 == pytest.approx(math.exp(-2), rel=0.05)
    sample = [normal(draws) for _ in range(40_000)]
    assert (fmean(sample), pvariance(sample)) == (pytest.approx(0, abs=0.02), pytest.approx(1, rel=0.02))
    assert sum(abs(x) > 1.96 for x in sample) / 40_000 == pytest.approx(0.05, rel=0.06)
