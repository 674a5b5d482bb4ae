"""Threads of another process are stopped while its others go on: what SIGSTOP cannot do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from tests.live.server import eventually

_SEIZE, _INTERRUPT = 0x4206, 0x4207  # requests of ptrace(2)
_WALL = 0x40000000  # waits for threads, too
_KILLED_S = 60.0


def threads_named(pid: int, name: str) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text().strip() == name]


def stand_still_until_killed(tids: Iterable[int]) -> None:
    """The threads make no step any more. Returns when somebody has killed their process, which only ends when whoever
    stopped its threads has heard of it. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    stopped = list(tids)
    for tid in stopped:
        for request in (_SEIZE, _INTERRUPT):
            if libc.ptrace(request, tid, None, None):
                raise OSError(ctypes.get_errno(), f"ptrace({request:#x}) of thread {tid}")
        os.waitpid(tid, _WALL)
    for tid in stopped:
        eventually(lambda tid=tid: _is_gone(tid), "the process is killed", _KILLED_S)  # type: ignore[misc]


def _is_gone(tid: int) -> bool:
    waited, status = os.waitpid(tid, _WALL | os.WNOHANG)
    return waited == tid and (os.WIFSIGNALED(status) or os.WIFEXITED(status))
