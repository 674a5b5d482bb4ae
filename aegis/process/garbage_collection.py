"""Garbage collection, rarely, in processes that serve."""

from __future__ import annotations

import gc

_YOUNG = 2_000  # new objects before the youngest are looked through; Python's own 700 come with every few requests
_MIDDLE = 10  # such examinations before what they left is: both are over in some milliseconds, or streams would pause
_OLD = 100  # of these before all is


def collect_seldom() -> None:
    """Objects that are alive now are never examined again, all of the later ones 30 times as seldom.

    Hardly anything here is cyclic, and an examination of all live objects stops a process for up to a quarter of a
    second: that makes tokens late.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
