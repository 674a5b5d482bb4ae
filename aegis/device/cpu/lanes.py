"""Lanes of the CPU device: each a number of threads, on cores of its own where the process has all of its cores.

An instance that computes with one thread has lanes, too. They share the time of the cores by the weights that Linux
gives threads of different nice values, 1.25 for each step (sched(7), "The nice value"). So a step of one lane begins in
the middle of a step of the other, and no run has to end for it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Final

from aegis.device.divisions import WHOLE, Shares, two_lanes
from aegis.process.openmp_threads import threads_of_process


@dataclass(frozen=True, slots=True)
class CpuLane:
    """A `Lane`. The threads that a thread in it starts inherit its `cores`: its pool of OpenMP has no other."""

    share: int
    threads: int
    cores: frozenset[int]
    nice: int = 0
    """Of its threads, where lanes share the time of the cores."""

    @property
    def stream(self) -> int:
        return 0

    def enter(self) -> None:
        os.sched_setaffinity(0, self.cores)  # the calling thread's, not the process's
        if self.nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + self.nice)

    def close(self) -> None:
        pass


_NICE: Final = (10, 8, 6, 4, 2, 0)
"""Of the lane with the smaller share."""

_WEIGHT: Final = 1.25


def timed_lanes() -> dict[Shares, tuple[int, int]]:
    """The nice values of two lanes on the same cores, by the shares that they come to. The first lane's is never the
    larger share: steps do not need it, whose time is small beside what they are run beside."""
    shares = {nice: round(1000 / (1 + _WEIGHT**nice)) for nice in _NICE}
    return {(share, 1000 - share): (nice, 0) for nice, share in shares.items()}


class DividedCores:
    """The cores that this process computes on, and the lanes made of them."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads` are those that the process computes with; if not given, OMP_NUM_THREADS says how many they are, or
        there is one for each core. With fewer than there are cores, other processes have some of these too: the lanes
        share the threads out, and the system places them."""
        self._cores = sorted(os.sched_getaffinity(0))
        self._threads = threads or threads_of_process(len(self._cores))
        self._first = two_lanes(self._threads)
        self._timed = timed_lanes() if self._threads == 1 else {}

    @property
    def timed(self) -> bool:
        return bool(self._timed)

    @property
    def partitions(self) -> tuple[Shares, ...]:
        return (WHOLE, *self._first, *self._timed)

    def lanes(self, shares: Shares) -> tuple[CpuLane, ...]:
        """Raises KeyError if it is no division."""
        if shares in self._timed:
            both = zip(shares, self._timed[shares], strict=True)
            return tuple([CpuLane(share, 1, frozenset(self._cores), nice) for share, nice in both])
        counts = (self._first[shares], self._threads - self._first[shares])
        pinned = self._threads == len(self._cores)
        lanes, start = list[CpuLane](), 0
        for share, count in zip(shares, counts, strict=True):
            cores = self._cores[start : start + count] if pinned else self._cores
            lanes.append(CpuLane(share, count, frozenset(cores)))
            start += count
        return tuple(lanes)
