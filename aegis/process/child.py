"""A process that another one started: its signals, its end with its parent's, and what it may take from others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def follow_launcher() -> None:
    """In a child, before all else: Ctrl-C in a terminal is for the launcher, which decides what it means. So the child
    is in a group of its own; to ignore the signal would not do, for what uvloop starts gets its default back."""
    os.setpgid(0, 0)
    end_with_launcher()


def end_with_launcher() -> None:
    """In a child: a launcher that is killed outright leaves no orphans (prctl PR_SET_PDEATHSIG, Linux)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stand_back(niceness: int) -> None:
    """In a child that is the one to lose: others get processors first, the system ends it before them where memory runs
    out, and its end leaves no core on the disk."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(niceness)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def limit_memory(nbytes: int, *, for_good: bool) -> None:
    """Limits this process to so many bytes of address space besides what it has; its parent may have set a lower
    limit. `for_good`: whatever runs in it cannot lift that."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + nbytes if most == resource.RLIM_INFINITY else min(taken + nbytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit if for_good else most))
