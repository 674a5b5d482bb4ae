"""Addresses for the weights of models, one range for each, which never changes.

A model gets its range when it is registered, and keeps it until it is removed; physical pages come and go beneath it.
So parameters are bound as views once, and a prefetched model is filled in place while another one runs. Aegaeon (§5.2)
bumps a pointer through one physical buffer, and has to compact it by copies on the device. Here nothing is ever moved:
address space costs nothing, and a new model takes the first gap that holds it.

Laws: (W1) ranges are disjoint, page-aligned and within the address space; (W2) a placed model's offset never changes;
(W3) a model is placed in the first gap that holds it.
"""

from __future__ import annotations

from itertools import pairwise

from aegis.core.errors import LawBroken
from aegis.core.ids import ModelId


class WeightRanges:
    """Offsets in pages within one reserved virtual range of `capacity` pages."""

    __slots__ = ("_placed", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._placed: dict[ModelId, tuple[int, int]] = {}

    def place(self, model: ModelId, pages: int) -> int | None:
        """The model's permanent offset; None when no gap in the address space holds it."""
        assert model not in self._placed and pages > 0
        offset = 0
        for start, size in sorted(self._placed.values()):
            if start - offset >= pages:
                break
            offset = start + size
        if offset + pages > self.capacity:
            return None
        self._placed[model] = (offset, pages)
        return offset

    def release(self, model: ModelId) -> None:
        del self._placed[model]

    @property
    def placed(self) -> int:
        """The pages that belong to models."""
        return sum(pages for _, pages in self._placed.values())

    def offset(self, model: ModelId) -> int:
        return self._placed[model][0]

    def pages(self, model: ModelId) -> int:
        return self._placed[model][1]

    def __contains__(self, model: ModelId) -> bool:
        return model in self._placed

    def check(self) -> None:
        ranges = sorted(self._placed.values())
        if any(a[0] + a[1] > b[0] for a, b in pairwise(ranges)):
            raise LawBroken("W1: two models' ranges overlap")
        if ranges and sum(ranges[-1]) > self.capacity:
            raise LawBroken("W1: a model's range ends outside the address space")
