"""The bandwidth and speed of a GPU by its own figures.

Bandwidth and arithmetic of a GPU follow from its clocks and widths; what its generation adds stands in a table.
Written from the documentation of CUDA 13; not run on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from aegis.core.estimators import Hardware
from aegis.device.cuda.driver import Gpu

_FLOPS_SHARE = 0.65  # that prefills reach of what tensor cores could do
_OVERHEAD_NS = 4_500_000  # of a step: 0.14 ms for each of 32 layers
_PCIE3, _PCIE4, _PCIE5 = 12.4e9, 24.75e9, 49.5e9  # the rates of pinned copies, in bytes per second


class _Generation(NamedTuple):
    flops_per_cycle: int  # of a multiprocessor, dense, at 16 bits
    copy_bytes_per_s: float
    memory_bytes_per_s: float  # if the GPU does not report it


_GENERATIONS = {
    (12, 0): _Generation(1024, _PCIE5, 1.5e12),
    (10, 0): _Generation(8192, _PCIE5, 8e12),
    (9, 0): _Generation(4096, _PCIE5, 3.35e12),
    (8, 1): _Generation(1024, _PCIE4, 6e11),
    (8, 0): _Generation(2048, _PCIE4, 1.5e12),
    (0, 0): _Generation(1024, _PCIE3, 6e11),
}
"""By the least compute capability, the newest first."""


def of_gpu(gpu: Gpu) -> Hardware:
    """Figures that the GPU does not report are taken from its generation, or from an old one."""
    capability = gpu.attribute("COMPUTE_CAPABILITY_MAJOR"), gpu.attribute("COMPUTE_CAPABILITY_MINOR")
    generation = next(of for least, of in _GENERATIONS.items() if capability >= least)
    clock_hz = 1e3 * (gpu.attribute("CLOCK_RATE") or 1_500_000)
    flops_per_s = (gpu.attribute("MULTIPROCESSOR_COUNT") or 64) * clock_hz * generation.flops_per_cycle
    twice_a_cycle = 2e3 * gpu.attribute("MEMORY_CLOCK_RATE") * gpu.attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
    return Hardware(
        copy_bytes_per_s=generation.copy_bytes_per_s,
        memory_bytes_per_s=twice_a_cycle or generation.memory_bytes_per_s,
        flops_per_s=flops_per_s * _FLOPS_SHARE,
        overhead_ns=_OVERHEAD_NS,
    )
