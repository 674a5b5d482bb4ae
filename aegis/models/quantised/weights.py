"""Weights as quantised checkpoints have them: what they stand for, some rows at a time, and as integers of ours."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from aegis.core.errors import ModelRefused
from aegis.core.model import GROUPS
from aegis.engine.quantised.integers import Integers, whole

ROWS = 256
"""Made floats at a time; even, for two neighbours may share a byte."""

_MIDDLE = 8  # of the 16 values of 4 bits


class Weight(Protocol):
    """The weight of a linear layer that comes quantised."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """float32 `[stop - start, in]`; `start` is a multiple of ROWS."""
        ...


class Grid(NamedTuple):
    """`(values - zeros) * scales`: `values [out, in]` are int8 of so many `bits`, `scales [out, groups]` float32 and
    `zeros`, like them, int16. Groups are neighbours, or those that `group_of [in]` says for each column."""

    bits: int
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group_of: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def rows(self, start: int, stop: int) -> torch.Tensor:
        values, scales = self.values[start:stop].float(), self.scales[start:stop]
        zeros = None if self.zeros is None else self.zeros[start:stop].float()
        if self.group_of is not None:
            if zeros is not None:
                values -= zeros[:, self.group_of]
            return values.mul_(scales[:, self.group_of])
        grouped = values.view(len(values), scales.shape[1], -1)
        if zeros is not None:
            grouped -= zeros.unsqueeze(-1)
        return grouped.mul_(scales.unsqueeze(-1)).view(values.shape)


class Blocks(NamedTuple):
    """Floats of 8 bits, a scale for each block of `block` rows and columns; the last ones may be smaller."""

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def rows(self, start: int, stop: int) -> torch.Tensor:
        of_rows = torch.arange(start, stop) // self.block[0]
        of_columns = torch.arange(self.shape[1]) // self.block[1]
        return self.values[start:stop].float().mul_(self.scales[of_rows][:, of_columns])


class Looked(NamedTuple):
    """Two numbers to a byte, the first in its upper half, that are places in a `book` of 16 floats; of `shape` when
    read in rows. The `scales` hold for so many neighbours each, across rows."""

    shape: tuple[int, int]
    stored: torch.Tensor
    book: torch.Tensor
    scales: torch.Tensor
    neighbours: int

    def rows(self, start: int, stop: int) -> torch.Tensor:
        columns = self.shape[1]
        first, last = start * columns, stop * columns
        stored = self.stored[first // 2 : (last + 1) // 2]
        places = torch.stack((stored >> 4, stored & 15), -1).view(-1)[: last - first]
        scales = self.scales[torch.arange(first, last) // self.neighbours]
        return self.book[places.int()].mul_(scales).view(-1, columns)


def dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(weight.shape, dtype=dtype)
    for start in range(0, len(made), ROWS):
        made[start : start + ROWS] = weight.rows(start, min(start + ROWS, len(made)))
    return made


def integers_of(weight: Weight, dtype: torch.dtype) -> Integers | None:
    """The same numbers, if integers of ours can be them and a kernel takes them, with scales and zeros that `dtype` can
    hold: of 16 bits it holds the nearest. Raises ModelRefused if they are too large for it."""
    if not isinstance(weight, Grid) or weight.group_of is not None or not whole(weight.values):
        return None
    found = _of_8_bits(weight) if weight.bits > 4 else _of_4_bits(weight)
    if found is None:
        return None
    scales = found.scales.to(dtype).float()
    zeros = None if found.zeros is None else found.zeros.to(dtype).float()
    if not all(bool(torch.isfinite(part).all()) for part in (scales, zeros) if part is not None):
        raise ModelRefused(f"its scales are too large for {str(dtype).removeprefix('torch.')}")
    return found._replace(scales=scales, zeros=zeros)


def _of_8_bits(grid: Grid) -> Integers | None:
    values = grid.values
    if grid.zeros is not None:
        shifted = values.view(len(values), grid.scales.shape[1], -1).to(torch.int16) - grid.zeros.unsqueeze(-1)
        if not -128 <= int(shifted.min()) <= int(shifted.max()) <= 127:
            return None
        values = shifted.to(torch.int8).view(values.shape)
    return Integers(8, values, grid.scales)


def _of_4_bits(grid: Grid) -> Integers | None:
    """Larger groups are several that have the same scale."""
    size = grid.shape[1] // grid.scales.shape[1]
    group = next((group for group in GROUPS if size % group == 0), None)
    if group is None:
        return None
    zeros = None if grid.zeros is None or not grid.zeros.any() else -grid.zeros.float() * grid.scales
    times = size // group
    return Integers(
        4,
        grid.values + _MIDDLE,
        grid.scales.repeat_interleave(times, 1),
        None if zeros is None else zeros.repeat_interleave(times, 1),
    )
