"""Tensors over memory that somebody else owns: raw addresses in, views out.

Nothing here touches a byte. An address need not be mapped when its view is made, only when the view is read: weights
and KV slabs are mapped and unmapped beneath views that live as long as the engine.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import KvShape
from aegis.engine.block_table import BlockTable
from aegis.engine.protocol import KvRegion

CPU = torch.device("cpu")

Indices = npt.NDArray[np.int64]


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch prints as `torch.<name>`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """A contiguous tensor of `shape` over the bytes at `address`, which stay the caller's."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    nbytes = count * dtype.itemsize
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype).view(tuple(shape))
    if device.index is None:  # a storage has to know which one
        device = torch.device(device.type, torch.cuda.current_device())
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, tuple(shape))  # type: ignore[call-overload,no-any-return]


def check_bound(module: torch.nn.Module, model: ModelId) -> None:
    """Raises ModelRefused if a tensor is still on the meta device: it has no bytes in the image, so the model cannot
    run."""
    missing = sorted(name for name, tensor in tensors_of(module) if tensor.is_meta)
    if missing:
        raise ModelRefused(f"{model}: the weight image lacks {', '.join(missing[:3])} ({len(missing)} tensors in all)")


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Whatever holds them: parameters, buffers, and plain attributes."""
    for path, part in module.named_modules():
        for held in (part._parameters, part._buffers, vars(part)):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}", value


@dataclass(frozen=True, slots=True)
class LayerViews:
    """One layer's cache, K `[units, block_tokens, heads * key_dim]`, V likewise: row `unit(block)` is that block's."""

    geometry: int  # layers of equal heads and dims share it
    heads: int
    key_dim: int
    value_dim: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.keys.dtype.itemsize


class KvViews:
    """A KV region seen through one shape.

    Blocks start at multiples of `unit`, the greatest common divisor of the slab and block sizes, so a single stride
    addresses them all, whatever the slab's tail: one index per block serves every layer, for both reading and writing.
    The rows of a view overlap where `unit` is less than a block; only rows at `unit(block)` are ever used.
    """

    __slots__ = ("_block_units", "_per_slab", "_slab_units", "block_tokens", "blocks", "dtype", "layers")

    def __init__(self, region: KvRegion, shape: KvShape, device: torch.device = CPU) -> None:
        self.dtype = dtype_named(shape.dtype)
        assert self.dtype.itemsize == shape.itemsize
        assert region.slab_bytes % shape.itemsize == 0
        self.block_tokens = shape.block_tokens
        self._per_slab = region.blocks_per_slab(shape)
        slab, block = region.slab_bytes // shape.itemsize, shape.block_bytes // shape.itemsize
        unit = math.gcd(slab, block)
        self._slab_units, self._block_units = slab // unit, block // unit
        whole = tensor_at(region.base, (region.nbytes // shape.itemsize,), self.dtype, device)

        def rows(offset: int, width: int, *inner: int) -> torch.Tensor:
            count = (whole.numel() - offset - math.prod(inner) * width) // unit + 1
            return whole.as_strided((count, *inner, width), (unit, *(width for _ in inner), 1), offset)

        self.blocks = rows(0, block)
        layers = []
        offset = 0
        for layer in shape.layers:
            key_width, value_width = layer.heads * layer.key_dim, layer.heads * layer.value_dim
            values_at = offset + key_width * shape.block_tokens
            keys, values = rows(offset, key_width, self.block_tokens), rows(values_at, value_width, self.block_tokens)
            geometry = shape.layers.index(layer)
            layers.append(LayerViews(geometry, layer.heads, layer.key_dim, layer.value_dim, keys, values))
            offset = values_at + value_width * shape.block_tokens
        self.layers = tuple(layers)

    def units(self, blocks: BlockTable) -> Indices:
        """The views' row of each block."""
        return blocks // self._per_slab * self._slab_units + blocks % self._per_slab * self._block_units
