"""Memory of one thread for what lasts no longer than a layer."""

from __future__ import annotations

from math import prod

import torch

KEPT_BYTES = 64 << 20
"""Larger memory is not kept."""


class Scratch:
    """One memory per place. Kept, because fresh pages cost more than to write them."""

    __slots__ = ("_memories",)

    def __init__(self) -> None:
        self._memories: dict[str, torch.Tensor] = {}

    def take(self, place: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor. The next one of the same place takes its memory."""
        nbytes = prod(shape) * dtype.itemsize
        memory = self._memories.get(place)
        if memory is None or memory.numel() < nbytes or memory.device != device:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            if nbytes <= KEPT_BYTES:
                self._memories[place] = memory
        return memory[:nbytes].view(dtype).view(shape)
