"""Products of floats with a weight of 8-bit integers, by the processor's products of bytes (VNNI).

Each row of the input is scaled to whole numbers of 16 bits (24 for float32), whose bytes become rows of their own. One
product of bytes with the weight, exact in 32-bit integers, then serves all of them, and its rows are added up with
their places. For a few rows it takes the time in which the weight is read, for many the time of bfloat16's product.
What is lost is the rounding to 16 bits of a row's largest value: less than bfloat16's own product loses.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

ROWS_MAX = 128
"""More are multiplied piece by piece, whose sums stay in the cache."""

_MIDDLE = 128
_SPARE = 4  # of the whole numbers, for a division that is rounded up
_TINY = 1e-30  # in place of the largest value of a row of zeros


class Digits(NamedTuple):
    """`bytes [digits * rows, in]`, the most significant digits first; `units [rows, 1]` are what 1 stands for."""

    bytes: torch.Tensor
    units: torch.Tensor


def supported() -> bool:
    """Whether this processor multiplies bytes; torch has slow code for others."""
    return bool(torch.cpu._is_vnni_supported()) and hasattr(torch.ops.onednn, "qlinear_pointwise")


def digits_of(x: torch.Tensor) -> Digits:
    """Of `x [rows, in]`."""
    count = 3 if x.dtype == torch.float32 else 2
    most = sum(127 << 8 * place for place in range(count)) - _SPARE
    units = x.abs().amax(-1, keepdim=True).float().clamp_min_(_TINY).div_(most)
    whole = (x / units).round_().to(torch.int32).add_(sum(_MIDDLE << 8 * place for place in range(count)))
    split = torch.empty((count, *x.shape), dtype=torch.uint8)
    for place in range(count):
        split[count - 1 - place] = (whole >> 8 * place) & 0xFF if place < count - 1 else whole >> 8 * place
    return Digits(split.view(-1, x.shape[1]), units)


def product(digits: Digits, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`[rows, out]` in float32, for an oneDNN tensor of the weight."""
    rows, none = digits.units.shape[0], _zeros(len(scales))
    run = torch.ops.onednn.qlinear_pointwise.default
    partial = run(digits.bytes, 1.0, _MIDDLE, weight, scales, none, None, 1.0, 0, torch.float32, "none", [], "")
    total = partial[:rows]
    for start in range(rows, len(partial), rows):
        total = torch.add(partial[start : start + rows], total, alpha=256)
    return total.mul_(digits.units)


@cache
def _zeros(count: int) -> torch.Tensor:
    """The weight's own zero points."""
    return torch.zeros(count, dtype=torch.int32)
