"""The machine that a result was measured on. No host names and no paths, because results are published."""

from __future__ import annotations

import os
import platform
import statistics
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

from aegis.device.cpu.libc import copy
from aegis.device.host_memory import MappedFile, SharedMemory

_MEMCPY_BYTES = 64 << 20


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


def summary() -> str:
    """This machine in a few words."""
    return f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores"


def memcpy_bytes_per_s(repetitions: int = 7) -> float:
    """Median bandwidth of one thread copying 64 MiB between faulted buffers larger than the usual caches."""
    memory = SharedMemory.create(2 * _MEMCPY_BYTES, "memcpy")
    region = MappedFile(memory.path, writable=True, populate=True)
    durations_ns = []
    for _ in range(repetitions):
        start_ns = time.perf_counter_ns()
        copy(region.base + _MEMCPY_BYTES, region.base, _MEMCPY_BYTES)
        durations_ns.append(time.perf_counter_ns() - start_ns)
    region.close()
    memory.close()
    return _MEMCPY_BYTES / statistics.median(durations_ns) * 1e9


def _cpu_model() -> str:
    return cpu_of(Path("/proc/cpuinfo").read_text()) or platform.machine()


def cpu_of(cpuinfo: str) -> str:
    """The name of the processor, empty if there is none. Many have the same one: it says where AVX-512 is missing,
    without which decode steps are not compiled."""
    fields = [[part.strip() for part in line.split(":", 1)] for line in cpuinfo.splitlines() if ":" in line]
    name = next((value for key, value in fields if key == "model name"), "")
    flags = next((value.split() for key, value in fields if key == "flags"), [])
    return name if "avx512f" in flags or not flags else f"{name} without AVX-512"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
