"""Products of floats with a weight of 8-bit integers, by the processor's products of bytes (VNNI).

Each row of the input is scaled to whole numbers of 16 bits (24 for float32), whose bytes become rows of their own. One
product of bytes with the weight, exact in 32-bit integers, then serves all of them, and its rows are added up with
their places. For a few rows it takes the time in which the weight is read, for many the time of bfloat16's product.
What is lost is the rounding to 16 bits of a row's largest value: less than bfloat16's own product loses.
"""

from __future__ import annotations

from functools import cache
from threading import local
from typing import NamedTuple

import torch

ROWS_MAX = 128
"""More are multiplied piece by piece, whose sums stay in the cache."""

_MIDDLE = 128
_SPARE = 4  # of the whole numbers, for a division that is rounded up
_PLACES = {torch.float32: 3, torch.bfloat16: 2, torch.float16: 2}
_WORTH_MAX = {places: sum(127 << 8 * place for place in range(places)) - _SPARE for places in (2, 3)}
_ZERO = {places: torch.full((1, 1), float(sum(_MIDDLE << 8 * at for at in range(places)))) for places in (2, 3)}
_SHIFTS = {places: 8 * torch.arange(places - 1, -1, -1, dtype=torch.int32).view(-1, 1, 1) for places in (2, 3)}
_TINY = torch.full((1, 1), 1e-30)  # in place of the largest value of a row of zeros

_held = local()


class Digits(NamedTuple):
    """`bytes [digits * rows, in]`, the most significant digits first; `units [rows, 1]` are what 1 stands for."""

    bytes: torch.Tensor
    units: torch.Tensor


def supported() -> bool:
    """Whether this processor multiplies bytes; torch has slow code for others."""
    return bool(torch.cpu._is_vnni_supported()) and hasattr(torch.ops.onednn, "qlinear_pointwise")


def digits_of(x: torch.Tensor) -> Digits:
    """The digits of the activations `x [rows, in]`."""
    places = _PLACES[x.dtype]
    units = torch.add(_TINY, x.abs().amax(-1, keepdim=True), alpha=1 / _WORTH_MAX[places])
    whole = torch.addcdiv(_ZERO[places], x, units).round_().to(torch.int32)
    return Digits((whole >> _SHIFTS[places]).to(torch.uint8).view(-1, x.shape[1]), units)


def digits_once(x: torch.Tensor) -> Digits:
    """The same, of the tensor that the calling thread asked for last without working: layers that read one input, as
    those of an attention do, are called one after the other. Nobody may write to it in between."""
    if getattr(_held, "x", None) is not x:
        _held.digits = digits_of(x.reshape(-1, x.shape[-1]))
        _held.x = x
    held: Digits = _held.digits
    return held


def product(digits: Digits, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`[rows, out]` in float32, for an oneDNN tensor of the weight."""
    rows, none = len(digits.units), _zeros(len(scales))
    run = torch.ops.onednn.qlinear_pointwise.default
    partial = run(digits.bytes, 1.0, _MIDDLE, weight, scales, none, None, 1.0, 0, torch.float32, "none", [], "")
    total: torch.Tensor = partial[:rows]
    for start in range(rows, len(partial), rows):
        total = partial[start : start + rows].add_(total, alpha=256)
    return total.mul_(digits.units)


@cache
def _zeros(count: int) -> torch.Tensor:
    """The weight's own zero points."""
    return torch.zeros(count, dtype=torch.int32)
