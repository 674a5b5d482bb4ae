"""The simulator's knowledge of a GPU and of its node: memory, links, and the time of steps on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from aegis.config.values import Count, Positive, Section, Size
from aegis.core.errors import UserError
from aegis.core.estimators import Hardware
from aegis.core.model import ModelSpec
from aegis.sim.compute_shares import ComputeShares
from aegis.sim.files import read
from aegis.sim.nano_batches import NanoBatchCosts
from aegis.sim.step_costs import StepCosts

_LAYER_NS = 140_000
_KV_EFFICIENCY = 0.35
_ROW_NS = 100_000
_FLOPS_EFFICIENCY = 0.65
_REDUCE_NS = 40_000
"""The bound of `GpuSpec.roofline`. With 0.14 ms per layer and all of the memory bandwidth for the weights, a decode
step on H800 comes within 4 % of the fits of Aegaeon's profiles (8.45, 11.70 and 12.93 ms for 7B, 9B and 13B). Reading
KV reaches 18 to 54 % of the bandwidth there, a row costs 0.09 to 0.12 ms and prefill 59 to 68 % of the FLOPS. In a
tensor-parallel group two all-reduces of some 20 us are added per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One device as an instance sees it; rates in bytes per second. All GPUs of a node share its `host_bytes_per_s`."""

    name: str
    memory_bytes: int  # for weights and KV, without what the engine itself needs
    in_bytes_per_s: int  # host to device
    out_bytes_per_s: int  # device to host, at the same time
    host_bytes_per_s: int
    gpus_per_node: int
    memory_bytes_per_s: int  # on the device
    flops_per_s: int  # dense bfloat16
    peer_bytes_per_s: int = 0  # to a device from those of its node; 0: they have no link of their own
    switch_ns: int = 2_000_000  # of a switch, beside its copies
    handover_ns: int = 200_000  # of a message from instance to instance
    layer_ns: int = _LAYER_NS
    run_ns: int = 0  # between two runs of an instance
    copy_ns: int = 0  # of a copy, whatever its size
    contention: int = 0  # thousandths that a run takes longer for each other one under way on the node
    shares: ComputeShares | None = None  # what lanes may have of it; None: it is not divided
    nano_batches: bool = False  # its engine splits each step in two, as NanoFlow does
    fits: Mapping[str, StepCosts] = field(default_factory=dict, hash=False)  # by the model's name or its shape's
    group_fits: Mapping[int, Mapping[str, StepCosts]] = field(default_factory=dict, hash=False)  # of so many GPUs

    def costs(self, spec: ModelSpec) -> StepCosts:
        """Measured costs of this model, else of its shape, else the roofline's."""
        costs = self.fits.get(spec.model) or self._of_shape(spec) or self.roofline(spec)
        return NanoBatchCosts.of(costs) if self.nano_batches else costs

    def _of_shape(self, spec: ModelSpec) -> StepCosts | None:
        """Those of a shape are of dense weights: a step that reads fewer bytes, or adapters too, takes so much less or
        more as reading them would. What it computes is the same."""
        costs, manifest = self.fits.get(spec.root), spec.manifest
        beside_bytes = manifest.image_bytes - manifest.parameters * manifest.kv.itemsize
        if costs is None or not beside_bytes:
            return costs
        read_ps = round(1e12 * beside_bytes / self.memory_bytes_per_s)
        least_ps = min(costs.decode_ps, len(manifest.kv.layers) * self.layer_ns * 1_000)
        return replace(costs, decode_ps=max(costs.decode_ps + read_ps, least_ps))

    def roofline(self, spec: ModelSpec) -> StepCosts:
        """Costs from figures alone, for a dense model with bfloat16 arithmetic (the efficiencies stand above)."""
        manifest, layers = spec.manifest, len(spec.manifest.kv.layers)
        overhead_ms = layers * self.layer_ns / 1e6
        weights_ms = 1e3 * manifest.image_bytes / self.memory_bytes_per_s
        kv_ms_per_ktoken = 1e6 * manifest.kv.token_bytes / (self.memory_bytes_per_s * _KV_EFFICIENCY)
        flops_per_ms = self.flops_per_s * _FLOPS_EFFICIENCY / 1e3
        return StepCosts.of_ms(
            decode=(overhead_ms + weights_ms, kv_ms_per_ktoken, _ROW_NS / 1e6),
            prefill=(
                0.0,
                1e3 * 2 * manifest.parameters / flops_per_ms,
                1e6 * 2 * layers * manifest.hidden_size / flops_per_ms,  # QK and AV, half of them behind the mask
            ),
        )

    def reading_share(self, spec: ModelSpec, context_tokens: int, rows: int) -> float:
        """The part of a decode step's time for which it reads memory at full speed: its traffic on the whole device.
        Reading KV does not reach all of the bandwidth (the efficiencies stand above)."""
        costs = self.costs(spec)
        weights_ps = 1e12 * spec.manifest.image_bytes / self.memory_bytes_per_s
        read_ps = weights_ps + _KV_EFFICIENCY * costs.context_token_ps * context_tokens
        return min(read_ps / (1e3 * costs.decode_ns(context_tokens, rows)), 1.0)

    @property
    def peers_max(self) -> int:
        """So many peers carry for one load: their host links, taken together, are as fast as the peer link."""
        return max(self.peer_bytes_per_s // self.in_bytes_per_s, 1) if self.peer_bytes_per_s else 0

    def hardware(self) -> Hardware:
        """The figures that the estimators may know before they have seen a step."""
        return Hardware(
            copy_bytes_per_s=self.in_bytes_per_s,
            memory_bytes_per_s=self.memory_bytes_per_s,
            flops_per_s=self.flops_per_s * _FLOPS_EFFICIENCY,
            overhead_ns=32 * self.layer_ns,
        )

    def group(self, ways: int) -> GpuSpec:
        """`ways` GPUs of a node as one tensor-parallel instance: each holds, copies and reads its part. Fits that
        were measured on one GPU do not carry over. Raises UserError if a node has too few."""
        if not 1 <= ways <= self.gpus_per_node:
            raise UserError(f"{self.name}x{ways}: a node has {self.gpus_per_node} of these GPUs")
        if ways == 1:
            return self
        return replace(
            self,
            name=f"{self.name}x{ways}",
            memory_bytes=self.memory_bytes * ways,
            in_bytes_per_s=self.in_bytes_per_s * ways,
            out_bytes_per_s=self.out_bytes_per_s * ways,
            gpus_per_node=self.gpus_per_node // ways,
            peer_bytes_per_s=0,
            memory_bytes_per_s=self.memory_bytes_per_s * ways,
            flops_per_s=self.flops_per_s * ways,
            layer_ns=self.layer_ns + _REDUCE_NS,
            fits=self.group_fits.get(ways, {}),
            group_fits={},
        )


_GB, _GIB = 10**9, 2**30
_PCIE5, _PCIE4 = 49_500_000_000, 24_750_000_000  # the rates of pinned copies over 64 and 32 GB/s
_NVLINK_900, _NVLINK_600, _NVLINK_400 = 450 * _GB, 300 * _GB, 200 * _GB  # one way of what vendors sum over both

_HOPPER = ComputeShares(units=132, step_units=16, prefill_traffic=0.3)
_AMPERE = ComputeShares(units=108, step_units=16, prefill_traffic=0.2)

_H800 = GpuSpec(
    name="h800",
    memory_bytes=70 * _GIB,
    in_bytes_per_s=_PCIE5,
    out_bytes_per_s=_PCIE5,
    host_bytes_per_s=480 * _GB,
    gpus_per_node=8,
    memory_bytes_per_s=3_350 * _GB,
    flops_per_s=989 * 10**12,
    peer_bytes_per_s=_NVLINK_400,
    shares=_HOPPER,
    fits={
        "qwen2.5-7b": StepCosts.of_ms(decode=(8.45, 0.06, 0.099), prefill=(0.0, 22.7, 0.0)),
        "yi-1.5-9b": StepCosts.of_ms(decode=(11.70, 0.16, 0.090), prefill=(0.0, 28.8, 0.0)),
        "llama-2-13b": StepCosts.of_ms(decode=(12.93, 0.45, 0.117), prefill=(0.0, 44.5, 0.0)),
    },
)
_H100 = replace(
    _H800,
    name="h100",
    peer_bytes_per_s=_NVLINK_900,
    fits={
        "yi-1.5-9b": StepCosts.of_ms(decode=(13.56, 0.02, 0.065), prefill=(0.0, 26.4, 0.0)),
        "llama-2-13b": StepCosts.of_ms(decode=(12.97, 0.11, 0.094), prefill=(0.0, 40.0, 0.0)),
    },
)
_H20 = replace(
    _H800,
    name="h20",
    peer_bytes_per_s=_NVLINK_900,
    memory_bytes=84 * _GIB,
    memory_bytes_per_s=4_000 * _GB,
    flops_per_s=148 * 10**12,
    shares=replace(_HOPPER, units=78),
    fits={},
)
_A10 = GpuSpec(
    name="a10",
    memory_bytes=21 * _GIB,
    in_bytes_per_s=_PCIE4,
    out_bytes_per_s=_PCIE4,
    host_bytes_per_s=320 * _GB,
    gpus_per_node=4,
    memory_bytes_per_s=600 * _GB,
    flops_per_s=125 * 10**12,
    shares=replace(_AMPERE, units=72),
)
_A100 = replace(
    _A10,
    name="a100",
    memory_bytes=70 * _GIB,
    gpus_per_node=8,
    memory_bytes_per_s=2_039 * _GB,
    flops_per_s=312 * 10**12,
    peer_bytes_per_s=_NVLINK_600,
    shares=_AMPERE,
    group_fits={
        4: {"llama-3-70b": StepCosts.of_ms(decode=(31.7, 0.12, 0.1), prefill=(43.0, 218.6, 1.6))},
        8: {"llama-3-70b": StepCosts.of_ms(decode=(23.0, 0.06, 0.1), prefill=(43.0, 109.3, 0.8))},
    },
)

GPUS = {spec.name: spec for spec in (_H100, _H800, _H20, _A10, _A100)}
"""Built-in GPUs. Memory bandwidth and FLOPS are the vendor's; 7/8 of the memory is for weights and KV (70 of 80 GB, as
in Aegaeon's artifact); the node is Aegaeon's testbed of eight (Figure 17: four A10), its host memory at 80 % of two
sockets of eight DDR5-4800 (A10: DDR4-3200) channels. Fits are of Aegaeon's published profiles; the 7B one for H100 is
poor (R² 0.8), so the roofline stands in. Switch and hand-over overheads are bounds that aegis sets itself.

A100 is the SXM one with 80 GB, in nodes of eight as MuxWise has them (§4.1). Its fit of a 70B model on eight of them
meets what that paper says of it: 505 ms for a step of 4 K tokens, 32 of them decode rows of 1 K tokens each, less than
100 ms for one of 256 and more for one of 512 (Figure 6 a, §1), 25 to 30 ms for a decode step (Table 3). On four, what
is computed and read takes twice as long, and what a step takes whatever its size stays.

Multiprocessors are the vendor's; lanes get 16 at a time, and a prefill beside a decode takes the traffic that MuxWise
saw at worst on A100 and H100 (`aegis.sim.compute_shares`). For the others the one of their generation stands in.

Peer links are NVLink's by the vendor's figures, half of what is summed over both ways: 900 GB/s for H100 and H20, 600
for A100, 400 for H800. A10 has none. Groups have none here: the ranks of one load over their own links already."""

_NAME = re.compile(r"(?P<name>[a-z0-9]+?)(?:x(?P<ways>[248]))?", re.ASCII)


def gpu(text: str) -> GpuSpec:
    """The value of `--gpu`: a built-in name, `h800x4` for a tensor-parallel group of four, or a YAML file.

    Raises UserError, one line: names what is known, or the file's key and what it should be.
    """
    match = _NAME.fullmatch(text)
    if match and (known := GPUS.get(match["name"])):
        return known.group(int(match["ways"] or 1))
    if text.endswith((".yaml", ".yml")):
        return _from_file(Path(text))
    raise UserError(f"--gpu {text}: should be {', '.join(GPUS)}, one of these with x2, x4 or x8, or a .yaml file")


_Ms = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]


class _Decode(Section):
    step: Positive
    ktoken: _Ms = 0.0
    row: _Ms = 0.0
    batch: _Ms = 0.0


class _Prefill(Section):
    step: _Ms = 0.0
    ktoken: _Ms = 0.0
    ktoken2: _Ms = 0.0


class _Fit(Section):
    """Milliseconds: per step or prompt, per 1 000 tokens, per row, per step of more than one, per 1 000 000 squared
    tokens."""

    decode_ms: _Decode
    prefill_ms: _Prefill = _Prefill()


class _Lanes(Section):
    """What lanes divide the device's compute into: units that can be given to one, multiprocessors or cores."""

    units: Count
    step: Count = 1
    prefill_traffic: _Ms = 0.0  # the part of the memory's bandwidth that a prefill on all of them takes
    decode_bend: Positive = 0.25
    prefill_bend: Positive = 8.0


class _GpuFile(Section):
    """Sizes in bytes, or as `70GiB`; rates are sizes per second."""

    name: str | None = Field(default=None, min_length=1)
    memory: Size
    link_in: Size
    link_out: Size | None = None
    host_bus: Size
    peer_link: Size | None = None
    gpus_per_node: Count = 1
    memory_bandwidth: Size
    tflops: Positive
    switch_ms: _Ms = 2.0
    handover_ms: _Ms = 0.2
    layer_ms: _Ms = _LAYER_NS / 1e6
    run_ms: _Ms = 0.0
    copy_ms: _Ms = 0.0
    contention: _Ms = 0.0
    lanes: _Lanes | None = None
    costs: dict[str, _Fit] = Field(default_factory=dict)


def _from_file(file: Path) -> GpuSpec:
    content = read(file, _GpuFile)
    return GpuSpec(
        name=content.name or file.stem,
        memory_bytes=content.memory,
        in_bytes_per_s=content.link_in,
        out_bytes_per_s=content.link_out or content.link_in,
        host_bytes_per_s=content.host_bus,
        gpus_per_node=content.gpus_per_node,
        memory_bytes_per_s=content.memory_bandwidth,
        flops_per_s=round(content.tflops * 1e12),
        peer_bytes_per_s=content.peer_link or 0,
        switch_ns=round(content.switch_ms * 1e6),
        handover_ns=round(content.handover_ms * 1e6),
        layer_ns=round(content.layer_ms * 1e6),
        run_ns=round(content.run_ms * 1e6),
        copy_ns=round(content.copy_ms * 1e6),
        contention=round(content.contention * 1e3),
        shares=_shares(content.lanes),
        fits={name: _costs(fit) for name, fit in content.costs.items()},
    )


class _CostsFile(Section):
    """The file that `aegis calibrate` writes; `beta` (eq. 4) is for people."""

    link_in: Size | None = None
    link_out: Size | None = None
    beta: Positive | None = None
    switch_ms: _Ms | None = None
    handover_ms: _Ms | None = None
    run_ms: _Ms | None = None
    copy_ms: _Ms | None = None
    contention: _Ms | None = None
    noise: _Ms | None = None
    lanes: _Lanes | None = None
    costs: dict[str, _Fit] = Field(min_length=1)


def with_costs(spec: GpuSpec, file: Path) -> GpuSpec:
    """The GPU with the measured costs of a file; values that the file lacks stay. Raises UserError, one line."""
    content = read(file, _CostsFile)
    rates = {"in_bytes_per_s": content.link_in, "out_bytes_per_s": content.link_out or content.link_in}
    times = {
        "switch_ns": content.switch_ms,
        "handover_ns": content.handover_ms,
        "run_ns": content.run_ms,
        "copy_ns": content.copy_ms,
    }
    measured: dict[str, Any] = {name: rate for name, rate in rates.items() if rate is not None}
    measured |= {name: round(time_ms * 1e6) for name, time_ms in times.items() if time_ms is not None}
    if content.contention is not None:
        measured["contention"] = round(content.contention * 1e3)
    if content.lanes is not None:
        measured["shares"] = _shares(content.lanes)
    fits = {name: _costs(fit) for name, fit in content.costs.items()}
    return replace(spec, **measured, fits={**spec.fits, **fits})


def costed(file: Path) -> frozenset[str]:
    """The models, or shapes, that such a file has costs of. Raises UserError."""
    return frozenset(read(file, _CostsFile).costs)


def measured_noise(file: Path) -> float | None:
    """The standard deviation of runs about their costs, as a share; None if the file does not say. Raises UserError."""
    return read(file, _CostsFile).noise


def _shares(lanes: _Lanes | None) -> ComputeShares | None:
    if lanes is None:
        return None
    return ComputeShares(
        units=lanes.units,
        step_units=min(lanes.step, lanes.units),
        prefill_traffic=lanes.prefill_traffic,
        decode_bend=lanes.decode_bend,
        prefill_bend=lanes.prefill_bend,
    )


def _costs(fit: _Fit) -> StepCosts:
    decode, prefill = fit.decode_ms, fit.prefill_ms
    return StepCosts.of_ms(
        decode=(decode.step, decode.ktoken, decode.row),
        prefill=(prefill.step, prefill.ktoken, prefill.ktoken2),
        batch=decode.batch,
    )
