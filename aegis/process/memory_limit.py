"""The memory that processes here may have: that of the machine, or what a container is given of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class MemoryLimit(NamedTuple):
    """`contained`: it is less than what the machine has."""

    nbytes: int
    contained: bool


def memory_limit(cgroups: Path = _CGROUPS, own: Path = _OWN) -> MemoryLimit:
    """The least of the machine's memory and the limits of this process's control groups (cgroups(7), of both
    versions)."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    least = min([machine, *_limits(cgroups, own)])
    return MemoryLimit(least, least < machine)


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if controllers == "":
            yield from _limits_above(cgroups, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_above(cgroups / "memory", path, "memory.limit_in_bytes")


def _limits_above(root: Path, path: str, name: str) -> Iterator[int]:
    """Of the group and all above it. A container may see a path that is one outside only: then the root is its own."""
    group = root / path.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(root):
            return
        try:
            told = (directory / name).read_text().strip()
        except OSError:
            continue
        if told.isdecimal():  # "max": no limit
            yield int(told)
