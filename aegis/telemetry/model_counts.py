"""The counts that a proxy keeps of each model, as numbers that can be sent and added up, for live views of a server."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import astuple, replace

from aegis.core.ids import ModelId


class Tally(Struct, frozen=True, array_like=True):
    """The counts of one model: requests `waiting` and `running` now, the others since the start. `due` are tokens on
    time, late or never made, `met` those on time."""

    model: ModelId
    waiting: int = 0
    running: int = 0
    arrived: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    met: int = 0
    due: int = 0


def total(tallies: Iterable[Tally]) -> dict[ModelId, Tally]:
    """The counts of several proxies, added up by model."""
    sums: dict[ModelId, Tally] = {}
    for tally in tallies:
        other = sums.get(tally.model)
        sums[tally.model] = _sum(tally, other) if other else tally
    return sums


def lasting(tallies: Iterable[Tally]) -> Iterable[Tally]:
    """The counts that still matter when their proxy is gone."""
    return (replace(tally, waiting=0, running=0) for tally in tallies)


def _sum(one: Tally, other: Tally) -> Tally:
    numbers = zip(astuple(one)[1:], astuple(other)[1:], strict=True)
    return Tally(one.model, *(a + b for a, b in numbers))
