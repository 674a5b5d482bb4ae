"""The bump buffer: the place of models' weights (Aegaeon §5.2), at addresses that never change.

A pointer moves through address space, past the ranges of models; physical pages come and go beneath them. A model gets
its range once, at registration, and keeps it until it is removed. So parameters are bound as views once, and a
prefetched model is filled in place while another one runs. Aegaeon's buffer is one physical range and has to be
compacted by an on-device copy; this one never is.

The pointer begins at 0 for each model. One that went on from the last range would come to the end, however few models
there are, where new ones come before old ones leave.

Laws: (B1) ranges are disjoint, page-aligned and within the buffer; (B2) a placed model's offset never changes; (B3) a
model is placed in the first gap that holds it.
"""

from __future__ import annotations

from itertools import pairwise

from aegis.core.errors import LawBroken
from aegis.core.ids import ModelId


class BumpBuffer:
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
            raise LawBroken("B1: two models' ranges overlap")
        if ranges and sum(ranges[-1]) > self.capacity:
            raise LawBroken("B1: a model's range ends outside the buffer")
