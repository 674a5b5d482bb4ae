"""The state that an instance's main loop leaves for the thread that speaks with the broker: plain values, written by
one thread and read by the other, so that neither ever waits."""

from __future__ import annotations

import time

from aegis.core.messages import Telemetry

STEP_S_MAX = 60.0
"""A pass of the main loop that takes longer has gone wrong, however busy it is."""

_BUSY_SHARE = 0.02  # of a processor: a process that waits for a lock uses less, and so does the thread itself


class LoopProgress:
    """The progress of one process."""

    __slots__ = ("passes", "report", "up")

    def __init__(self) -> None:
        self.passes = 0
        """Of the main loop; it makes several a second with nothing to do."""
        self.report: Telemetry | None = None
        self.up = False


class Progress:
    """A number that grows while the main loop gets on: it has made another pass, or is in a long step, which shows in
    the processor time of the process."""

    def __init__(self, loop_progress: LoopProgress) -> None:
        self._loop_progress = loop_progress
        self._passes = -1
        self._pass_s = 0.0
        self._seen_s = 0.0
        self._used_s = 0.0
        self._value = 0

    def value(self, now_s: float, used_s: float) -> int:
        """`used_s` is the processor time of the process."""
        passes, since_s = self._loop_progress.passes, now_s - self._seen_s
        worked = used_s - self._used_s > _BUSY_SHARE * since_s
        self._seen_s, self._used_s = now_s, used_s
        if passes != self._passes:
            self._passes, self._pass_s = passes, now_s
            self._value += 1
        elif worked and now_s - self._pass_s < STEP_S_MAX:
            self._value += 1
        return self._value

    def now(self) -> int:
        return self.value(time.monotonic(), time.process_time())
