"""The number of files that a process, and those that it starts, may have open."""

from __future__ import annotations

import contextlib
import resource

_ENOUGH = 1 << 16
"""What is many more makes programs slow that close, or make tables of, all the descriptors there may be."""


def allow_many_open_files() -> int:
    """Raises the soft limit towards the hard one: 1024 is a common soft limit, and each connection and each link takes
    one. Returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
