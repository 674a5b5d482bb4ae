"""One measured figure, and what it has to be."""

from __future__ import annotations

from msgspec import Struct


class Figure(Struct, frozen=True):
    """A measurement and what it has to be; `ok` None: it was measured for information."""

    name: str
    value: float
    unit: str
    wanted: str = ""
    ok: bool | None = None


def at_least(name: str, value: float, unit: str, limit: float) -> Figure:
    return Figure(name, value, unit, f"≥ {limit:g}", value >= limit)


def at_most(name: str, value: float, unit: str, limit: float) -> Figure:
    return Figure(name, value, unit, f"≤ {limit:g}", value <= limit)
