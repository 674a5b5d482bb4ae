"""What a step beside another run takes at worst (MuxWise §3.3.2, "Worst-case estimation" and "Contention guard").

The guard is a grid over what decides contention: new and reused tokens of the run beside, rows and cached tokens of the
decode, and the decode's share of the compute. A cell holds the largest factor that was seen in it: the time of a step
over the one that is estimated for it alone on the whole device. Steps of one cell differ, and estimates err by up to
8.84 % in the paper; so what was seen counts for that much more. The paper fills its grid by a profile of 12 hours; here
it is filled by what is served. What nobody has seen yet is bounded from the safe side: a run on a share s takes no
longer than 1 / s of its time on the whole device, nor than s' / s of its time on a larger share s', and beside another
run no more than `worst` besides. A device that was profiled before, as in the paper, says it itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct

WHOLE: Final = 1_000
WORST: Final = 0.3
"""The largest slowdown that MuxWise saw on any device (Figure 11)."""
_ERROR: Final = 0.0884
_LEAST_TOKENS: Final = 2_048  # the grid's first step; powers of 4 above it, up to 128 K, as in §3.3.2
_STEPS: Final = 4


class Beside(Struct, frozen=True):
    """A run beside a decode: `new` tokens that it prefills after `reused` ones, or of rows of another decode."""

    new: int
    reused: int = 0


class Decoding(Struct, frozen=True):
    """A decode of so many rows, over so many cached tokens in all."""

    rows: int
    context: int


Cell = tuple[int, int, int, int]
Profile = Callable[[int], float]
"""The time of a step on a share beside the worst prefill, over that alone on the whole device: measured beforehand."""


class ContentionGuard:
    """Of one model on one device. `factor` is never below what was seen in the same cell with the same or a larger
    share, and never smaller for a smaller share."""

    __slots__ = ("_cells", "_profile", "_worst")

    def __init__(self, worst: float = WORST, profile: Profile | None = None) -> None:
        assert worst >= 0
        self._worst = worst
        self._profile = profile
        self._cells: dict[Cell, dict[int, float]] = {}  # the largest factor for each share

    def factor(self, decoding: Decoding, beside: Beside | None, share: int) -> float:
        """At worst, times the time alone on the whole device. `share` is the decode's, in thousandths."""
        assert 0 < share <= WHOLE
        bound = self._bound(beside, share)
        seen = self._cells.get(_cell(decoding, beside))
        if seen is None:
            return bound
        least = 0.0
        for at, factor in seen.items():
            bound = min(bound, factor * (max(at, share) / share)) if at != share else bound
            if at >= share:
                least = max(least, factor)
        return max(seen.get(share, bound), least)

    def _bound(self, beside: Beside | None, share: int) -> float:
        """Where nothing was seen."""
        if beside and self._profile:
            return self._profile(share)
        return WHOLE / share * (1 + self._worst if beside else 1.0)

    def saw(self, decoding: Decoding, beside: Beside | None, share: int, factor: float) -> None:
        """A step took `factor` times its time alone on the whole device."""
        seen = self._cells.setdefault(_cell(decoding, beside), {})
        seen[share] = max(seen.get(share, 0.0), factor * (1 + _ERROR))


def _cell(decoding: Decoding, beside: Beside | None) -> Cell:
    if beside is None:
        return -1, -1, decoding.rows.bit_length(), _step(decoding.context)
    return _step(beside.new), _step(beside.reused), decoding.rows.bit_length(), _step(decoding.context)


def _step(tokens: int) -> int:
    """0 below the first step, then one for each power of 4 up to the last."""
    at, bound = 0, _LEAST_TOKENS
    while tokens >= bound and at < _STEPS:
        at, bound = at + 1, bound * 4
    return at
