"""What a share of a device's compute is worth, and what runs cost each other that are under way on one device.

This is the one place where the simulator knows it, for every policy alike.

Speed against share. A run on a share s of the compute has the speed `s · (1 + bend) / (s + bend)` of one that has it
all. With a large bend that is the share itself: prefill is bound by compute (MuxWise §2.2, "compute-intensive, with
compute demand growing linearly"). With a small one a part of the compute has most of the speed: decode is bound by
memory, and few multiprocessors keep the memory busy (MuxWise Figure 3 b and §2.2, where its demand for compute hardly
grows; Nexus, arXiv 2507.06608, §1, "diminishing returns beyond a saturation point"). Neither paper gives the curve in
numbers: a bend of 1/4, with which a third of the compute has 71 % of the speed and half of it 83 %, is ours, as is one
of 8 for prefill, with which half of the compute has 53 %.

Contention. Green contexts, as cores, divide compute and not the memory's bandwidth (MuxWise §3.3.1). Every run takes a
part of that bandwidth, its traffic, and if the parts of all runs add up to more than the whole, all of them take longer
in proportion. A decode step takes the bandwidth for as long as it reads weights and KV. A prefill takes so much that it
slows a decode that needs all bandwidth by the worst that MuxWise saw: 20 % on A100, 30 % on H100 (Figure 11, §3.3.2).
With a smaller share, or beside a decode that needs less, it costs less, down to nothing, as in that figure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

WHOLE: Final = 1_000
"""Shares, speeds and traffic are in thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeShares:
    """Of a device with so many `units` of compute, multiprocessors or cores, that lanes get in steps of `step_units`.
    `prefill_traffic` is the part of the bandwidth that a prefill takes on the whole device."""

    units: int
    step_units: int
    prefill_traffic: float
    decode_bend: float = 0.25
    prefill_bend: float = 8.0

    def __post_init__(self) -> None:
        assert 0 < self.step_units <= self.units and self.prefill_traffic >= 0
        assert self.decode_bend > 0 and self.prefill_bend > 0

    def divisions(self) -> tuple[tuple[int, int], ...]:
        """The shares of two lanes, the smallest of the first one first: what an instance's core may choose from. Half
        a step, at least, remains for the second one."""
        last = self.units - (self.step_units + 1) // 2
        firsts = [WHOLE * units // self.units for units in range(self.step_units, last + 1, self.step_units)]
        return tuple([(first, WHOLE - first) for first in firsts])

    def decode_slowness(self, share: int) -> int:
        """Thousandths of its time alone on the whole device, WHOLE of which is the whole share."""
        return _slowness(share, self.decode_bend)

    def worst_decode_factor(self, share: int) -> float:
        """What a profile before serving finds (MuxWise §3.3.2): the time of a step on that share beside a prefill that
        takes the bandwidth it takes at worst, over its time alone on the whole device."""
        return self.decode_slowness(share) / WHOLE * (1 + self.prefill_traffic)

    def prefill_slowness(self, share: int) -> int:
        return _slowness(share, self.prefill_bend)

    def decode_traffic(self, share: int, memory: float) -> int:
        """`memory` is the part of its time alone in which a step reads memory at full speed."""
        return round(WHOLE * memory * WHOLE / self.decode_slowness(share))

    def prefill_traffic_of(self, share: int) -> int:
        return round(WHOLE * self.prefill_traffic * WHOLE / self.prefill_slowness(share))


def _slowness(share: int, bend: float) -> int:
    assert 0 < share <= WHOLE
    part = share / WHOLE
    return round(WHOLE * (part + bend) / (part * (1 + bend)))


class SharedBandwidth:
    """The memory bandwidth of one device, taken by the runs that are under way on it."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: dict[Callable[[int], None], int] = {}  # in order

    @property
    def slowness(self) -> int:
        """How slow each run under way is, in thousandths; WHOLE where there is bandwidth for all."""
        return max(sum(self._runs.values()), WHOLE)

    def enter(self, changed: Callable[[int], None], traffic: int) -> None:
        """A run begins. `changed` is told the slowness of it from now on, until `leave`, whenever that changes."""
        before, others = self.slowness, list(self._runs)
        self._runs[changed] = min(traffic, WHOLE)
        self._tell(before, others)

    def leave(self, changed: Callable[[int], None]) -> None:
        before = self.slowness
        self._runs.pop(changed, None)
        self._tell(before, list(self._runs))

    def _tell(self, before: int, others: list[Callable[[int], None]]) -> None:
        if self.slowness != before:
            for changed in others:
                changed(self.slowness)
