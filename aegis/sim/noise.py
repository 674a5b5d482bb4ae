"""Noise: how much longer or shorter runs take than their costs say, drawn anew for each."""

from __future__ import annotations

from typing import Final

from aegis.core.ids import InstanceId
from aegis.core.rng import Stream
from aegis.core.views import PPM

_DRAWS: Final = 12
_LEAST_PPM: Final = 100_000


class RunNoise:
    """The factors on the runs of one instance, in millionths: normally distributed about 1 with a standard deviation of
    `share`, never below a tenth. All steps of a run have the same factor, as costs are measured by the run.

    A sum of uniform draws stands in for the normal distribution, since logarithms and roots are not the same bits on
    every machine.
    """

    __slots__ = ("_draws", "_share")

    def __init__(self, share: float, seed: int, instance: InstanceId) -> None:
        self._share = share
        self._draws = Stream(seed, "noise", instance)

    def factor_ppm(self) -> int:
        deviation = sum([self._draws.uniform() for _ in range(_DRAWS)]) - _DRAWS / 2
        return max(PPM + round(PPM * self._share * deviation), _LEAST_PPM)
