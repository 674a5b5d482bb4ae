"""A process that another one started: its signals, and its end with its parent's."""

from __future__ import annotations

import ctypes
import os
import signal

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
