"""What a result was measured on. No host names and no paths: results are published."""

from __future__ import annotations

import os
import platform
import statistics
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

from aegis.device.cpu_pages import PAGE_BYTES, AddressSpace, PhysicalPages
from aegis.device.libc import copy

_MEMCPY_PAGES = 64


class Machine(Struct, frozen=True):
    """A machine and its software. `cores` are those this process may use."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    torch: str
    date: str
    memcpy_bytes_per_s: float


def describe() -> Machine:
    """This machine, now; takes a fraction of a second for the memcpy."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=_version("torch"),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        memcpy_bytes_per_s=memcpy_bytes_per_s(),
    )


def memcpy_bytes_per_s(repetitions: int = 7) -> float:
    """Median bandwidth of one thread copying 64 MiB between faulted buffers larger than the usual caches."""
    half = _MEMCPY_PAGES * PAGE_BYTES // 2
    pages = PhysicalPages(_MEMCPY_PAGES)
    space = AddressSpace(_MEMCPY_PAGES)
    pages.send(0, _MEMCPY_PAGES, space.base)
    durations_ns = []
    for _ in range(repetitions):
        start_ns = time.perf_counter_ns()
        copy(space.base + half, space.base, half)
        durations_ns.append(time.perf_counter_ns() - start_ns)
    pages.fetch(0, _MEMCPY_PAGES, space.base)
    space.close()
    pages.close()
    return half / statistics.median(durations_ns) * 1e9


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
