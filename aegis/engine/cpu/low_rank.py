"""What LoRA adapters add to the layers of a model, by the compiled code. For the few rows of a decode step that takes a
fraction of the time that products of torch do."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from aegis.core.ids import ModelId
from aegis.engine.cpu.library import FLOATS, HALVES, RANK_MAX, Change, library

_NUMBERS = {torch.float32: FLOATS, torch.bfloat16: HALVES}
_VECTOR = 16


class LowRank(NamedTuple):
    """What an adapter adds to a layer: `scale * up (down x)`. `up` lies transposed, for a few rows to read it in
    order."""

    down: torch.Tensor  # [rank, in]
    up: torch.Tensor  # [rank, out]
    scale: float


class OfRows(NamedTuple):
    """Where the adapters of rows are told, for as long as this lives."""

    addresses: NDArray[np.uint64]  # [rows]; 0: none
    held: Sequence[object]

    @property
    def pointer(self) -> int:
        return self.addresses.ctypes.data


class Changes:
    """The adapters of a model, whose layers are numbered as their `paths`. Matrices are read where they lie, and stay
    there until the adapter is removed."""

    __slots__ = ("_adapters", "_paths")

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._adapters: dict[ModelId, ctypes.Array[Change]] = {}

    def add(self, adapter: ModelId, made: Mapping[str, LowRank]) -> None:
        """Adds an adapter, whose changes are `made` by the path of the layer; changes of layers that are not here are
        left out."""
        self._adapters[adapter] = (Change * len(self._paths))(*(_change(made.get(path)) for path in self._paths))

    def remove(self, adapter: ModelId) -> None:
        self._adapters.pop(adapter, None)

    def of_rows(self, adapters: Sequence[ModelId | None]) -> OfRows | None:
        """None: none of the rows has an adapter that is here."""
        found = [None if adapter is None else self._adapters.get(adapter) for adapter in adapters]
        if not any(found):
            return None
        addresses = [0 if each is None else ctypes.addressof(each) for each in found]
        return OfRows(np.array(addresses, dtype=np.uint64), found)


def _change(made: LowRank | None) -> Change:
    if made is None:
        return Change()
    assert len(made.down) <= RANK_MAX and made.down.is_contiguous() and made.up.is_contiguous()
    return Change(made.down.data_ptr(), made.up.data_ptr(), len(made.down), made.scale)


def takes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether `add_changes` can be called with them."""
    whole = x.shape[1] % _VECTOR == 0 and y.shape[1] % _VECTOR == 0
    return x.device.type == "cpu" and x.dtype in _NUMBERS and whole and library() is not None


def add_changes(rows: OfRows, layer: int, x: torch.Tensor, y: torch.Tensor) -> None:
    """Adds to `y [rows, results]`, in place, what the adapters make of `x [rows, columns]` in the layer of this
    number."""
    found, x = library(), x.contiguous()
    assert found is not None and x.dtype == y.dtype and y.is_contiguous() and len(x) == len(y) == len(rows.addresses)
    sizes, threads = (len(x), x.shape[1], y.shape[1]), torch.get_num_threads()
    found.aegis_add_changes(rows.pointer, layer, x.data_ptr(), y.data_ptr(), *sizes, _NUMBERS[x.dtype], threads)
