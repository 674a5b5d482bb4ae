"""Draws from distributions, the same to the last bit on any machine.

The C library's `log` and `exp` may differ in the last bit from one machine to the next. Here is nothing but what
IEEE 754 rounds in one way only: + − × ÷, the square root, and the exact `frexp` and `ldexp`.
"""

from __future__ import annotations

from math import frexp, ldexp, sqrt

from aegis.core.rng import Stream

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_ATANH = tuple(1 / k for k in range(23, 0, -2))  # of s, s³, …, the highest power first
_EXP_TERMS = 14


def ln(x: float) -> float:
    """The natural logarithm of x > 0, within 4e-16 of it relative to max(1, |ln x|)."""
    assert x > 0
    mantissa, exponent = frexp(x)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = 2 * mantissa, exponent - 1
    s = (mantissa - 1) / (mantissa + 1)  # ln m = 2 atanh s, |s| < 0.172
    square, total = s * s, 0.0
    for coefficient in _ATANH:
        total = total * square + coefficient
    return exponent * _LN2 + 2 * s * total


def exp(x: float) -> float:
    """e to the x, for x up to 700, within 1e-13 of it relatively; 0 where it is too small for a float."""
    assert x <= 700
    if x < -760:
        return 0.0
    exponent = round(x / _LN2)
    rest = x - exponent * _LN2
    total = 1.0
    for k in range(_EXP_TERMS, 0, -1):
        total = total * rest / k + 1
    return ldexp(total, exponent)


def exponential(draws: Stream) -> float:
    """Mean 1."""
    return -ln(1 - draws.uniform())


def normal(draws: Stream) -> float:
    """Mean 0, deviation 1 (Marsaglia, Bray: A Convenient Method for Generating Normal Variables, 1964)."""
    while True:
        x, y = 2 * draws.uniform() - 1, 2 * draws.uniform() - 1
        square = x * x + y * y
        if 0 < square < 1:
            return x * sqrt(-2 * ln(square) / square)


def gamma(draws: Stream, shape: float) -> float:
    """Mean `shape`, scale 1 (Marsaglia, Tsang: A Simple Method for Generating Gamma Variables, 2000)."""
    if shape < 1:
        boost = exp(ln(1 - draws.uniform()) / shape)
        return gamma(draws, shape + 1) * boost
    d = shape - 1 / 3
    c = 1 / sqrt(9 * d)
    while True:
        x = normal(draws)
        root = 1 + c * x
        v = root * root * root  # a power would be the C library's
        if v > 0 and ln(1 - draws.uniform()) < x * x / 2 + d - d * v + d * ln(v):
            return d * v
