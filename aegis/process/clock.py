"""The live clocks. CLOCK_MONOTONIC is one for all processes of a machine."""

from __future__ import annotations

import time


class MonotonicClock:
    """Implements `aegis.core.clock.Clock`. The machine's clock may be `ahead_ns` of the launcher's, which holds."""

    __slots__ = ("_ahead_ns",)

    def __init__(self, ahead_ns: int = 0) -> None:
        self._ahead_ns = ahead_ns

    def now_ns(self) -> int:
        return time.monotonic_ns() - self._ahead_ns


class ThreadClock:
    """Goes on while the calling thread has a processor."""

    __slots__ = ()

    def now_ns(self) -> int:
        return time.thread_time_ns()
