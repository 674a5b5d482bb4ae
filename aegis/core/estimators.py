"""Latency estimators (Aegaeon Appendix A.2, eq. 4-6), fitted from the engine's own telemetry.

No profiling step stands between registering a model and serving it: until there are observations the analytic bound
from `Hardware` is used. The fits are exponentially weighted least squares through the origin in one variable, which is
what eq. 4-6 are once a model's constants are folded in; they cost O(1) per observation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aegis.core.model import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a device can do, before anything was measured on it."""

    copy_bytes_per_s: float = 8e9  # host to device
    memory_bytes_per_s: float = 8e9  # weights streamed by a decode step
    flops_per_s: float = 2e11
    step_overhead_ns: int = 2_000_000


@dataclass(slots=True)
class Ratio:
    """cost ≈ slope · size + floor-free: the weighted mean slope, newer observations weighing more."""

    slope: float
    decay: float = 0.9
    _size: float = field(default=0.0, init=False)
    _cost: float = field(default=0.0, init=False)

    def observe(self, size: float, cost: float) -> None:
        if size <= 0:
            return
        self._size = self._size * self.decay + size
        self._cost = self._cost * self.decay + cost
        self.slope = self._cost / self._size

    def at(self, size: float) -> int:
        return round(self.slope * size)


class Latency:
    """Estimates for one model on one kind of device, all in nanoseconds."""

    __slots__ = ("_bytes", "_decode", "_prefill", "_switch")

    def __init__(self, manifest: Manifest, hardware: Hardware) -> None:
        self._bytes = manifest.image_bytes
        self._switch = Ratio(1e9 / hardware.copy_bytes_per_s)
        flops_ns = 2e9 * manifest.parameters / hardware.flops_per_s
        self._prefill = Ratio(flops_ns + hardware.step_overhead_ns / 256)
        weights_ns = 1e9 * manifest.image_bytes / hardware.memory_bytes_per_s
        self._decode = Ratio(weights_ns + hardware.step_overhead_ns)

    def switch_ns(self) -> int:
        """Eq. 4: model bytes over link bandwidth, corrected by what was seen."""
        return self._switch.at(self._bytes)

    def prefill_ns(self, tokens: int) -> int:
        """Eq. 5 with its quadratic term folded into the observed slope."""
        return self._prefill.at(tokens)

    def decode_ns(self) -> int:
        """Eq. 6 at the batch sizes and contexts lately seen: the time of one step."""
        return self._decode.at(1)

    def saw_switch(self, duration_ns: int) -> None:
        self._switch.observe(self._bytes, duration_ns)

    def saw_prefill(self, tokens: int, duration_ns: int) -> None:
        self._prefill.observe(tokens, duration_ns)

    def saw_decode(self, duration_ns: int) -> None:
        self._decode.observe(1, duration_ns)
