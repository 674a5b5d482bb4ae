"""The same market with more traffic, or less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from bench.workloads.arrival import Arrival, in_order

_SHIFT_NS = 60_000_000_000  # the shape of a day stays, and no two copies of a burst coincide


def at_load(arrivals: Sequence[Arrival], load: float) -> list[Arrival]:
    """`load` times as many requests over the same time, of the same models and lengths. Whole copies of the workload
    are laid over it, each a minute later than the one before; what comes after the end comes at the start. Of the last
    copy, or of the only one, every so many-th request is taken."""
    if not arrivals:
        return []
    span_ns, copies = max(arrival.at_ns for arrival in arrivals) + 1, ceil(load)
    shift_ns = min(_SHIFT_NS, span_ns // copies)
    return in_order(
        replace(arrival, at_ns=(arrival.at_ns + copy * shift_ns) % span_ns)
        for copy in range(copies)
        for arrival in _share(arrivals, min(load - copy, 1.0))
    )


def _share(arrivals: Sequence[Arrival], share: float) -> list[Arrival]:
    """So much of them, evenly."""
    return [each for number, each in enumerate(arrivals) if int((number + 1) * share) > int(number * share)]
