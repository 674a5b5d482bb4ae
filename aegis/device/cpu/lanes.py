"""Lanes of the CPU device: each a number of threads, on cores of its own where the process has all of its cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from aegis.device.divisions import WHOLE, Shares, two_lanes


@dataclass(frozen=True, slots=True)
class CpuLane:
    """A `Lane`. The threads that a thread in it starts inherit its `cores`: its pool of OpenMP has no other."""

    share: int
    threads: int
    cores: frozenset[int]

    @property
    def stream(self) -> int:
        return 0

    def enter(self) -> None:
        os.sched_setaffinity(0, self.cores)  # the calling thread's, not the process's

    def close(self) -> None:
        pass


class DividedCores:
    """The cores that this process computes on, and the lanes made of them."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads` are those that the process computes with; if not given, OMP_NUM_THREADS says how many they are, or
        there is one for each core. With fewer than there are cores, other processes have some of these too: the lanes
        share the threads out, and the system places them."""
        self._cores = sorted(os.sched_getaffinity(0))
        self._threads = threads or threads_of_process(len(self._cores))
        self._first = two_lanes(self._threads)

    @property
    def partitions(self) -> tuple[Shares, ...]:
        return (WHOLE, *self._first)

    def lanes(self, shares: Shares) -> tuple[CpuLane, ...]:
        """Raises KeyError if it is no division."""
        counts = (self._first[shares], self._threads - self._first[shares])
        pinned = self._threads == len(self._cores)
        lanes, start = list[CpuLane](), 0
        for share, count in zip(shares, counts, strict=True):
            cores = self._cores[start : start + count] if pinned else self._cores
            lanes.append(CpuLane(share, count, frozenset(cores)))
            start += count
        return tuple(lanes)


def threads_of_process(cores: int, environment: Mapping[str, str] = os.environ) -> int:
    """The number that OpenMP starts, which is torch's too: at most one for each core."""
    told = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    return min(int(told), cores) if told.isdecimal() and int(told) > 0 else cores
