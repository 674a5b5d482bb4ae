"""The orders in which kernels for processors with AVX-512 read integers, for those who want them in rows.

torch's kernel for 4 bits: blocks of 64 rows of the weight; in a block, for each column 32 bytes, of which byte i holds
row i in its low half and row i + 32 in its high one. oneDNN's for 8 bits: blocks of 64 rows and 64 columns; in a block,
for every four columns the 64 rows, four bytes each.
"""

from __future__ import annotations

from functools import cache

import torch

from aegis.engine.packed_linear import bytes_of

BLOCK_ROWS = BLOCK_COLUMNS = 64

_HALF = BLOCK_ROWS // 2
_MIDDLE = 8


def of_halves(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight `[out, in]`, as a view of its transpose, that `packed [out, in / 2]` and `scales [groups, out, 2]`
    stand for, in the type of the scales. `out` is a multiple of BLOCK_ROWS."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    groups, halves = scales.shape[0], packed.view(-1, columns, _HALF)
    values = torch.empty(columns, len(halves), 2, _HALF, dtype=scales.dtype)
    for at, half in enumerate((halves & 15, halves >> 4)):
        values[:, :, at] = half.sub_(_MIDDLE).view(torch.int8).transpose(0, 1)  # wraps around, to be signed
    scale, zero = scales.permute(2, 0, 1).unsqueeze(2).contiguous()
    grouped = values.view(groups, columns // groups, rows)
    return torch.addcmul(zero, grouped, scale, out=grouped).view(columns, rows).t()


def of_split(upper: torch.Tensor, lower: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The same for bytes of which the halves, `[out, in / 2]` each, were packed apart, with `scales [groups, out]`."""
    rows, columns = upper.shape[0], upper.shape[1] * 2
    high, low = upper.view(-1, columns, _HALF), lower.view(-1, columns, _HALF)
    values = torch.empty(columns, len(high), 2, _HALF, dtype=scales.dtype)
    for at, bytes_ in enumerate(((high << 4) | (low & 15), (high & 0xF0) | (low >> 4))):
        values[:, :, at] = bytes_.bitwise_xor_(0x80).view(torch.int8).transpose(0, 1)  # less the middle, 128
    grouped = values.view(len(scales), columns // len(scales), rows)
    return grouped.mul_(scales.unsqueeze(1)).view(columns, rows).t()


def of_bytes(packed: torch.Tensor, shape: tuple[int, int], start: int, stop: int) -> torch.Tensor:
    """The rows from `start` to `stop`, int8, of a weight of this shape, both multiples of blocks."""
    rows, columns = shape
    fours = packed[: rows * columns].view(torch.int32)
    blocks = fours.view(-1, columns // BLOCK_COLUMNS, BLOCK_COLUMNS // 4, BLOCK_ROWS)
    wanted = blocks[start // BLOCK_ROWS : stop // BLOCK_ROWS]
    return wanted.permute(0, 3, 1, 2).reshape(stop - start, columns // 4).contiguous().view(torch.int8)


@cache
def bytes_are_known() -> bool:
    """Whether this machine has the second order."""
    rows, columns = 2 * BLOCK_ROWS, 2 * BLOCK_COLUMNS
    values = torch.arange(rows * columns, dtype=torch.int32).remainder(251).sub(125).to(torch.int8).view(rows, columns)
    packed = bytes_of(torch.ops.onednn.qlinear_prepack(values, None))
    return torch.equal(of_bytes(packed, (rows, columns), BLOCK_ROWS, rows), values[BLOCK_ROWS:])


@cache
def halves_are_known() -> bool:
    """Whether this machine has the first: torch has others for other processors."""
    values = torch.arange(BLOCK_ROWS * 32, dtype=torch.int32).remainder(13).view(BLOCK_ROWS, 32)
    scales = torch.tensor([1.0, float(_MIDDLE)]).expand(1, BLOCK_ROWS, 2).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    return torch.equal(of_halves(packed, scales), values.float())
