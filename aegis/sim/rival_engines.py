"""How the engines of rivals differ from the one that is simulated, as changes of a device. Every constant of theirs
stands here or in `nano_batches`.

NanoFlow: its nano-batches (`aegis.sim.nano_batches`).

LoongServe (elastic sequence parallelism): groups of GPUs with a copy of the weights each, of which an iteration gets as
many as it needs. MuxWise runs it with two groups of four GPUs for Llama-70B and with four groups of two for Llama-8B
(§4.1). What is said of it here: a decode and a prefill run on groups of their own, which change between steps; a group
has its own memory bandwidth, so neither slows the other; the copies of the weights leave less room for KV. A decode on
half of the GPUs takes as much longer as the fits of a 70B model on four and on eight A100 say: 31.7 ms in place of
23.0 ms (`aegis.sim.gpu_costs`), which a bend of 0.6 gives. What is not said: KV that moves from group to group takes no
time, as LoongServe says of its own scaling down, and it need not fit in the groups that decode.

SGLang-PD: KV goes from the GPUs that prefill to those that decode over NVLink, "providing 600 GB/s" (§4.1), half of it
in each direction, and not through the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from aegis.core.errors import UserError
from aegis.core.model import ModelSpec
from aegis.sim.compute_shares import ComputeShares
from aegis.sim.gpu_costs import GpuSpec

NANO_BATCHES: Final = "nano-batches"
_ELASTIC: Final = "elastic-"
_NVLINK: Final = "nvlink-"
_NVLINK_BYTES_PER_S: Final = 300_000_000_000
_ELASTIC_BEND: Final = 0.6


def elastic(groups: int) -> str:
    """The name of LoongServe's engine with so many groups of GPUs."""
    return f"{_ELASTIC}{groups}"


def nvlink(ways: int) -> str:
    """The name of SGLang-PD's engine with instances of so many GPUs."""
    return f"{_NVLINK}{ways}"


def with_engine(gpu: GpuSpec, engine: str | None, specs: Sequence[ModelSpec]) -> GpuSpec:
    """The device as that engine uses it; None: as it is. Raises UserError."""
    if engine is None:
        return gpu
    if engine == NANO_BATCHES:
        return replace(gpu, nano_batches=True)
    if engine.startswith(_NVLINK):
        rate = int(engine.removeprefix(_NVLINK)) * _NVLINK_BYTES_PER_S
        return replace(gpu, in_bytes_per_s=rate, out_bytes_per_s=rate, host_bytes_per_s=0)
    if not engine.startswith(_ELASTIC):
        raise UserError(f"unknown engine {engine!r}")
    groups = int(engine.removeprefix(_ELASTIC))
    copies = (groups - 1) * sum([spec.manifest.image_bytes for spec in specs])
    shares = ComputeShares(units=groups, step_units=1, prefill_traffic=0.0, decode_bend=_ELASTIC_BEND)
    return replace(gpu, memory_bytes=gpu.memory_bytes - copies, shares=shares)
