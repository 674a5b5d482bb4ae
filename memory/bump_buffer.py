"""The bump buffer: the place of models' weights (Aegaeon §5.2), at addresses that never change.

A pointer moves through address space; physical pages come and go beneath it. A model gets its range once, at
registration, and keeps it until it is removed. So parameters are bound as views once, and a prefetched model is filled
in place while another one runs. Aegaeon's buffer is one physical range and has to be compacted by an on-device copy;
this one never is.

Laws: (B1) ranges are disjoint and page-aligned; (B2) a placed model's offset never changes; (B3) with no model placed
the pointer is at 0.
"""

from __future__ import annotations

from itertools import pairwise

from aegis.core.errors import LawBroken
from aegis.core.ids import ModelId


class BumpBuffer:
    """Offsets in pages within one reserved virtual range of `capacity` pages."""

    __slots__ = ("_next", "_placed", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._next = 0
        self._placed: dict[ModelId, tuple[int, int]] = {}

    def place(self, model: ModelId, pages: int) -> int | None:
        """The model's permanent offset; None when the address space is used up."""
        assert model not in self._placed and pages > 0
        if self._next + pages > self.capacity:
            return None
        offset = self._next
        self._next += pages
        self._placed[model] = (offset, pages)
        return offset

    def release(self, model: ModelId) -> None:
        """Address space is only reused from the end: it is plentiful, and a gap costs nothing."""
        del self._placed[model]
        self._next = max((offset + pages for offset, pages in self._placed.values()), default=0)

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
        if not ranges and self._next:
            raise LawBroken("B3: the buffer is empty and its pointer is not at 0")
