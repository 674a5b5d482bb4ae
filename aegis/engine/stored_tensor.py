"""A tensor as a weight image stores it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch


class Stored(NamedTuple):
    """`content` are its rows, or its packed bytes where `packing` says how. Tied tensors have all their names."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    content: torch.Tensor
    buffer: bool
    packing: bytes = b""

    @staticmethod
    def in_rows(names: Iterable[str], tensor: torch.Tensor, *, buffer: bool) -> Stored:
        return Stored(tuple(names), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor, buffer)
