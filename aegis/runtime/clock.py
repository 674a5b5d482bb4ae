"""The live clocks. CLOCK_MONOTONIC is one for all processes of a node."""

from __future__ import annotations

import time


class MonotonicClock:
    """Implements `aegis.core.clock.Clock`."""

    __slots__ = ()

    def now_ns(self) -> int:
        return time.monotonic_ns()


class ThreadClock:
    """Goes on while the calling thread has a processor."""

    __slots__ = ()

    def now_ns(self) -> int:
        return time.thread_time_ns()
