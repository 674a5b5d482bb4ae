"""The live clock. CLOCK_MONOTONIC is one for all processes of a node."""

from __future__ import annotations

import time


class MonotonicClock:
    """Implements `aegis.core.clock.Clock`."""

    __slots__ = ()

    def now_ns(self) -> int:
        return time.monotonic_ns()
