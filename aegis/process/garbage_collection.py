"""How seldom processes that serve look for garbage."""

from __future__ import annotations

import gc

_YOUNG = 20_000  # new objects before the youngest are looked through; Python's own 700 come with every few requests


def seldom() -> None:
    """What is alive now is never looked through again, what comes later 30 times as seldom.

    Next to nothing here is cyclic, and a look through all that is alive stops a process for up to a quarter of a
    second: within that time a token is late.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, 10)
