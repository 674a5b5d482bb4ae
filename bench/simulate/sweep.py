"""`--sweep models=16:80:8`: one key of a workload in even steps, and where a curve falls below 90 %."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from msgspec import Struct

from aegis.core.errors import UserError

GOAL = 0.9
_POINTS_MAX = 1000


class Sweep(Struct, frozen=True):
    """`values` as they are written into the workload, ascending."""

    key: str
    values: tuple[str, ...]


def parse(text: str) -> Sweep:
    """`KEY=LOW:HIGH:STEP`, HIGH being the last value where steps lead to it. Raises UserError."""
    key, equals, steps = text.partition("=")
    try:
        low, high, step = (Decimal(part) for part in steps.split(":"))
        sound = key and equals and 0 <= low <= high and step > 0 and (high - low) / step < _POINTS_MAX
    except (ValueError, InvalidOperation):
        sound = False
    if not sound:
        raise UserError(f"--sweep {text}: should be KEY=LOW:HIGH:STEP like models=16:80:8, no more than {_POINTS_MAX}")
    return Sweep(key, tuple(f"{low + index * step:f}" for index in range(int((high - low) / step) + 1)))


class Crossing(Struct, frozen=True, omit_defaults=True):
    """The point at which a curve first falls below 90 %: `at` a value, or the whole curve lies `below` or `above`:
    before its first value, or after its last one."""

    at: float | None = None
    below: float | None = None
    above: float | None = None

    def __str__(self) -> str:
        if self.at is not None:
            return f"{self.at:.3g}"
        return f"< {self.below:g}" if self.below is not None else f"> {self.above:g}"


def crossing(values: Sequence[float], attainments: Sequence[float]) -> Crossing:
    """Where the curve crosses the goal, on straight lines between the points."""
    assert len(values) == len(attainments) > 0
    if attainments[0] < GOAL:
        return Crossing(below=values[0])
    for index in range(1, len(values)):
        before, after = attainments[index - 1], attainments[index]
        if after < GOAL:
            share = (before - GOAL) / (before - after)
            return Crossing(at=round(values[index - 1] + share * (values[index] - values[index - 1]), 4))
    return Crossing(above=values[-1])
