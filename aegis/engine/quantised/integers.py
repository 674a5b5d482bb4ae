"""A weight as whole numbers with scales, whoever chose them: the canonical form that layers are made of.

Of 8 bits, a value v stands for `v * scale`; of 4 bits, for `(v - 8) * scale + zero`. A scale holds for a group of
neighbours in a row of the weight; of 8 bits the group is usually the whole row.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from aegis.core.model import WeightsName, group_of, is_whole

_MIDDLE = 8  # of the 16 values of 4 bits
_LARGEST = 15


class Integers(NamedTuple):
    """`values [out, in]` are int8: any, or of 4 bits 0 to 15. `scales` and `zeros [out, in / group]` are
    floats; without `zeros` they are 0, as they are of 8 bits."""

    bits: Literal[4, 8]
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns


def check(integers: Integers) -> None:
    """Raises ValueError unless shapes belong together and values are in their range: a checkpoint may say anything."""
    bits, values, scales, zeros = integers
    if values.ndim != 2 or values.dtype != torch.int8:
        raise ValueError(f"its integers are {values.dtype} of shape {list(values.shape)}, not a matrix of int8")
    rows, columns = values.shape
    groups = scales.shape[-1] if scales.ndim == 2 else 0
    if scales.shape[:1] != (rows,) or groups < 1 or columns % groups:
        raise ValueError(f"its scales of shape {list(scales.shape)} do not go with integers of {list(values.shape)}")
    if zeros is not None and (bits == 8 or zeros.shape != scales.shape):
        raise ValueError(f"its zeros of shape {list(zeros.shape)} do not go with scales of {list(scales.shape)}")
    if bits == 4 and values.numel() and not 0 <= int(values.min()) <= int(values.max()) <= _LARGEST:
        raise ValueError(f"its integers are not between 0 and {_LARGEST}")
    if not all(bool(torch.isfinite(part).all()) for part in (scales, zeros) if part is not None):
        raise ValueError("its scales or zeros are not finite")


def whole(matrix: torch.Tensor) -> bool:
    """Whether kernels take it: they read whole vectors, also beyond its end."""
    return is_whole(*matrix.shape)


def quantise(weight: torch.Tensor, weights: WeightsName) -> Integers | None:
    """The integers nearest to a weight `[out, in]`, with scales and zeros that its own type can hold. Of 8 bits where
    its rows have no groups. None if no kernel takes its shape."""
    if not whole(weight):
        return None
    rows, columns = weight.shape
    group = group_of(weights, columns)
    wide = weight.float().view(rows, -1, group or columns)
    if group is None:
        scales = _as_held(wide.abs().amax(-1) / 127, weight.dtype)
        values = (wide / _divisor(scales)).round_().clamp_(-127, 127)
        return Integers(8, values.to(torch.int8).view(weight.shape), scales)
    low, high = wide.amin(-1), wide.amax(-1)
    scales = _as_held((high - low) / 15, weight.dtype)
    zeros = _as_held(low + _MIDDLE * scales, weight.dtype)
    values = ((wide - zeros.unsqueeze(-1)) / _divisor(scales)).round_().add_(_MIDDLE).clamp_(0, 15)
    return Integers(4, values.to(torch.int8).view(weight.shape), scales, zeros)


def dequantised(integers: Integers) -> torch.Tensor:
    """The weight that they stand for, in float32."""
    bits, values, scales, zeros = integers
    wide = values.float().view(values.shape[0], scales.shape[1], -1)
    if bits == 4:
        wide = wide - _MIDDLE
    wide = wide * scales.float().unsqueeze(-1)
    if zeros is not None:
        wide = wide + zeros.float().unsqueeze(-1)
    return wide.view(values.shape)


def _as_held(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).float()


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """A group of one value only has the scale 0."""
    return torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
