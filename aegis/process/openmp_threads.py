"""The number of threads that a process computes with."""

from __future__ import annotations

import os
from collections.abc import Mapping


def threads_of_process(cores: int, environment: Mapping[str, str] = os.environ) -> int:
    """The number that OpenMP starts, which is torch's too: at most one for each core."""
    told = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    return min(int(told), cores) if told.isdecimal() and int(told) > 0 else cores
