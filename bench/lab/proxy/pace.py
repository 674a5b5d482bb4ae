"""How evenly a core works: a loop that asks nobody, again and again. Requests cannot be more even than that."""

from __future__ import annotations

import time
from statistics import median

from msgspec import Struct

from aegis.core.clock import NS_PER_MS
from bench.lab.proxy.child import kept_to

_TRIAL = 20_000  # turns of the loop


class Pace(Struct, frozen=True):
    """Of a loop that is `p50_ms` long."""

    p50_ms: float
    p99_ms: float


def pace(core: int, length_ms: float, times: int) -> Pace:
    """A loop of about `length_ms`, that many times."""
    with kept_to((core,)):
        trial_ns = median(_took_ns(_TRIAL) for _ in range(9))
        turns = max(int(_TRIAL * length_ms * NS_PER_MS / trial_ns), 1)
        took_ns = sorted(_took_ns(turns) for _ in range(times))
    return Pace(median(took_ns) / NS_PER_MS, took_ns[len(took_ns) * 99 // 100] / NS_PER_MS)


def _took_ns(turns: int) -> int:
    began_ns, total = time.perf_counter_ns(), 0
    for turn in range(turns):
        total += turn
    return time.perf_counter_ns() - began_ns
