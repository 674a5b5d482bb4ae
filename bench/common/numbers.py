"""Numbers as people read them."""

from __future__ import annotations

from math import ceil, floor, log10

NONE = "–"


def percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"


def seconds(value: float | None) -> str:
    """Seconds, in the unit that fits."""
    if value is None:
        return NONE
    if value == 0 or abs(value) >= 0.9995:
        return f"{value:,.3g} s" if abs(value) < 999.5 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 0.9995e-3 else f"{value * 1e6:.3g} µs"


def size(nbytes: float) -> str:
    """Bytes, in the unit that fits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * scale:
            shown = nbytes / scale
            return f"{shown:.3g} {unit}" if shown < 999.5 else f"{shown:,.0f} {unit}"
    return f"{nbytes:.0f} B"


def number(value: float | None) -> str:
    if value is None:
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers in `[low, high]`, about as many as wanted."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** floor(log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= wanted)
    first = ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten from below `low` to above `high`."""
    return [10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1)]
