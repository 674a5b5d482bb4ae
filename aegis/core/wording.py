"""Times, three digits and the unit last, and counts as they stand in a sentence."""

from __future__ import annotations

_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))


def duration(ns: int) -> str:
    """`1.2 s`, `450 ms`, `0 s`."""
    for unit_ns, unit in _TIMES:
        if abs(ns) >= unit_ns:
            scaled = ns / unit_ns
            return f"{scaled:.3g} {unit}" if abs(scaled) < 999.5 else f"{scaled:.0f} {unit}"
    return f"{ns} ns" if ns else "0 s"


def when(ns: int) -> str:
    """`in 1.2 s`, `1.2 s ago`, seen from now."""
    return f"in {duration(ns)}" if ns >= 0 else f"{duration(-ns)} ago"


def since(ns: int) -> str:
    """`, as planned 1.2 s ago`, or nothing where that is now."""
    return f", as planned {duration(ns)} ago" if ns else ""


def count(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
