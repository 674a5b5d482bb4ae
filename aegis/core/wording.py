"""The wording of reasons: what more than one of them says, and times and counts as they stand in a sentence.

Times have three digits, and the unit last.
"""

from __future__ import annotations

from collections.abc import Iterable

from aegis.core.ids import ModelId, RequestId

ALONE = "nobody else has work"
UNWANTED = "nobody waits for it"

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


def percent(ppm: int) -> str:
    """`12 %`."""
    return f"{ppm / 10_000:.0f} %"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"


# --- who is next ------------------------------------------------------------------------------------------------------


def due(token: str, ns: int) -> str:
    """`first token due in 1.2 s`."""
    return f"{token} due {when(ns)}"


def takes(what: str, ns: int) -> str:
    """`prefill 400 ms`."""
    return f"{what} {duration(ns)}"


def first_in_line(jobs: int) -> str:
    """`first of 3 in line`."""
    return f"first of {jobs} in line"


# --- requests ---------------------------------------------------------------------------------------------------------


def request_of(request: RequestId, model: ModelId, priority: int = 0) -> str:
    """`request 12 of bakery`, `request 12 of bakery, of priority -1,`."""
    return f"request {request} of {model}" + (f", of priority {priority}," if priority else "")


def given_up(request: RequestId, model: ModelId, tokens: int, priority: int = 0) -> str:
    """`request 12 of bakery is given up after 3 tokens`."""
    return f"{request_of(request, model, priority)} is given up after {count(tokens, 'token')}"


def among(priorities: Iterable[int]) -> str:
    """`, with requests of priority -1 and 2`, or nothing where all are 0."""
    named = [str(priority) for priority in sorted({*priorities} - {0})]
    if not named:
        return ""
    listed = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
    return f", with requests of priority {listed}"


# --- what leaves the device -------------------------------------------------------------------------------------------


def leaves(what: str, needed: ModelId | None) -> str:
    """`weights of bakery leave for florist`; None: for another instance."""
    return f"{what} for {'another instance' if needed is None else needed}"


def stays(because: str, spared: str, next_use: str) -> str:
    """`nobody waits for it; florist stays, its turn is number 2 of 3`: the batch or model that would have been next to
    go."""
    return f"{because}; {spared} stays, {next_use}"
