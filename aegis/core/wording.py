"""Times and sizes as they stand in a sentence: three digits, the unit last."""

from __future__ import annotations

_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def duration(ns: int) -> str:
    """`1.2 s`, `450 ms`, `0 s`."""
    return _scaled(ns, _TIMES, "ns") if ns else "0 s"


def when(ns: int) -> str:
    """`in 1.2 s`, `1.2 s ago`, seen from now."""
    return f"in {duration(ns)}" if ns >= 0 else f"{duration(-ns)} ago"


def since(ns: int) -> str:
    """`, as planned 1.2 s ago`, or nothing where that is now."""
    return f", as planned {duration(ns)} ago" if ns else ""


def size(nbytes: int) -> str:
    """`2.1 GiB`, `0 B`."""
    return _scaled(nbytes, _SIZES, "B")


def _scaled(value: int, units: tuple[tuple[int, str], ...], smallest: str) -> str:
    for scale, unit in units:
        if abs(value) >= scale:
            scaled = value / scale
            return f"{scaled:.3g} {unit}" if abs(scaled) < 999.5 else f"{scaled:.0f} {unit}"
    return f"{value} {smallest}"
