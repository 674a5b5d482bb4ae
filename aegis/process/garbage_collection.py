"""Garbage collection, rarely, in processes that serve."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

_YOUNG = 2_000  # new objects before the youngest are looked through; Python's own 700 come with every few requests
_MIDDLE = 10  # such examinations before what they left is: both are over in some milliseconds, or streams would pause
_OLD = 1_000  # of these before all is, in a process that is never idle
_OLD_IDLE = 10  # in one that is
_LOOK_S = 1.0


def collect_seldom() -> None:
    """Objects that are alive now are never examined again, all of the later ones 300 times as seldom, or when the
    process is idle.

    Hardly anything here is cyclic, and an examination of all live objects stops a process, with 5 000 requests that
    wait for more than half a second: that makes tokens late.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


def collect_while_idle() -> None:
    """To be called when nobody waits for anything; does nothing if hardly any objects have come since the last time."""
    if gc.get_count()[2] >= _OLD_IDLE:
        gc.collect()


async def collect_when_idle(busy: Callable[[], bool]) -> None:
    """Runs until it is cancelled."""
    while True:
        await asyncio.sleep(_LOOK_S)
        if not busy():
            collect_while_idle()
