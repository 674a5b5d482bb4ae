"""How the compute of a device may be divided into lanes: shares in thousandths, the first lane's first."""

from __future__ import annotations

from collections.abc import Mapping

Shares = tuple[int, ...]

WHOLE: Shares = (1000,)
"""The device is not divided."""

_DIVISIONS = 8  # about as many: more would differ by less than an estimate errs


def two_lanes(units: int, *, least: int = 1, step: int = 1) -> Mapping[Shares, int]:
    """The divisions of so many cores or multiprocessors into two lanes, by their shares: how many the first lane gets,
    a multiple of `step`. Each lane has `least` of them or more."""
    step *= max(units // _DIVISIONS // step, 1)
    firsts = range(-(-least // step) * step, units - least + 1, step)
    shares = [round(1000 * first / units) for first in firsts]
    return {(share, 1000 - share): first for share, first in zip(shares, firsts, strict=True)}
