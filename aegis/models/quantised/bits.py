"""Whole numbers of few bits that were put one after the other into words of 32, the lowest bits first."""

from __future__ import annotations

import torch

WORD_BITS = 32
_IN_THREE_BYTES = 8  # numbers of 3 bits


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[rows, numbers]` of int32 `[rows, words]`."""
    rows = len(words)
    stored = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stored
    if bits == 3:
        low, middle, high = stored.view(rows, -1, 3).int().unbind(-1)
        wide, count = low | middle << 8 | high << 16, _IN_THREE_BYTES
    else:
        wide, count = stored, 8 // bits
    parts = [(wide >> bits * at & (1 << bits) - 1).to(torch.uint8) for at in range(count)]
    return torch.stack(parts, -1).view(rows, -1)


def signed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """int8, less the middle of what so many bits can be."""
    return (numbers.to(torch.int16) - (1 << bits - 1)).to(torch.int8)
