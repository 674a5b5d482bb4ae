"""The order in which torch's kernel for 4 bits reads a weight on processors with AVX-512.

Blocks of 64 rows of the weight; in a block, for each column 32 bytes, of which byte i holds row i in its low half and
row i + 32 in its high one.
"""

from __future__ import annotations

from functools import cache

import torch

BLOCK_ROWS = 64

_HALF = BLOCK_ROWS // 2
_MIDDLE = 8


def unpacked(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
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


@cache
def are_known() -> bool:
    """Whether this machine has that order: torch has others for other processors."""
    values = torch.arange(BLOCK_ROWS * 32, dtype=torch.int32).remainder(13).view(BLOCK_ROWS, 32)
    scales = torch.tensor([1.0, float(_MIDDLE)]).expand(1, BLOCK_ROWS, 2).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    return torch.equal(unpacked(packed, scales), values.float())
