"""The state that an instance's main loop leaves for the thread that speaks with the broker: plain values, written by
one thread and read by the other, so that neither ever waits."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aegis.core.messages import Telemetry

STEP_S_MAX = 60.0
"""A pass of the main loop that takes longer has gone wrong, however busy it is."""

_BUSY_SHARE = 0.02  # of a processor: a process that waits for a lock uses less


class LaneProgress:
    """The progress of one thread that runs steps on a lane of the device."""

    __slots__ = ("began_s", "clock", "steps")

    def __init__(self, clock: int) -> None:
        self.clock = clock
        """That of the thread's processor time, as `time.clock_gettime` knows it."""
        self.began_s: float | None = None
        """When the run under way began; None: there is none."""
        self.steps = 0
        """Of all runs, and runs that ended."""


class LoopProgress:
    """The progress of one process."""

    __slots__ = ("hangs", "lanes", "passes", "report", "up")

    def __init__(self) -> None:
        self.lanes: tuple[LaneProgress, ...] = ()
        """Of the threads beside the main loop that run steps."""
        self.hangs = False
        """A lane does not get on: written by the thread that speaks with the broker."""
        self.passes = 0
        """Of the main loop; it makes several a second with nothing to do."""
        self.report: Telemetry | None = None
        self.up = False


class _Watched:
    """One thread, looked at now and then: whether it gets on, that is makes another step, or is in a long one, which
    shows in the processor time that it uses."""

    __slots__ = ("_moved_s", "_seen_s", "_steps", "_used_s")

    def __init__(self) -> None:
        self._steps = -1
        self._moved_s = 0.0
        self._seen_s = 0.0
        self._used_s = 0.0

    def gets_on(self, now_s: float, steps: int, used_s: float) -> bool:
        worked = used_s - self._used_s > _BUSY_SHARE * (now_s - self._seen_s)
        self._seen_s, self._used_s = now_s, used_s
        if steps != self._steps:
            self._steps, self._moved_s = steps, now_s
            return True
        return worked and now_s - self._moved_s < STEP_S_MAX


def _processor_s(clock: int) -> float | None:
    """The processor time of a thread; None: the thread has ended."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return None


class Progress:
    """A number that grows while the main loop gets on, and each lane that runs something: a loop that still answers is
    of no use to the requests of a lane that hangs."""

    def __init__(self, loop_progress: LoopProgress) -> None:
        self._loop_progress = loop_progress
        self._loop = _Watched()
        self._lanes: dict[int, _Watched] = {}  # by clock
        self._value = 0

    def value(self, now_s: float, used_s: float, lanes: Sequence[tuple[LaneProgress, float]] = ()) -> int:
        """`used_s` is the processor time of the process but for the thread that asks; each of the `lanes` goes with
        that of its thread."""
        progress = self._loop_progress
        loop_gets_on = self._loop.gets_on(now_s, progress.passes, used_s)
        hangs = False
        for lane, lane_used_s in lanes:
            if lane.began_s is None:
                self._lanes.pop(lane.clock, None)  # how long ago it had its last step says nothing of its next run
            else:
                hangs |= not self._lanes.setdefault(lane.clock, _Watched()).gets_on(now_s, lane.steps, lane_used_s)
        progress.hangs = hangs
        self._value += loop_gets_on and not hangs
        return self._value

    def now(self) -> int:
        lanes = self._loop_progress.lanes  # read once: the main loop may divide the device at any time
        used = [(lane, used_s) for lane in lanes if (used_s := _processor_s(lane.clock)) is not None]
        # Without this thread's: on a slow machine it uses a share that the main loop could be taken to be busy by.
        return self.value(time.monotonic(), time.process_time() - time.thread_time(), used)

    def lanes_ns(self) -> tuple[int, ...]:
        """How long the run on each lane has lasted; 0 where there is none."""
        now_s, lanes = time.monotonic(), self._loop_progress.lanes
        began_s = [lane.began_s for lane in lanes]
        return tuple([0 if began is None else max(int((now_s - began) * 1e9), 1) for began in began_s])
