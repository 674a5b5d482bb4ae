"""A model of vLLM's and its weight image: which tensors are stored, and how they are bound again.

The image holds what vLLM's loader leaves behind, projections of attention and gates fused as its layers want them. On a
CPU the weights of linear layers are stored packed (`packed_linear`), and in rows only where they are looked up too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any

import torch

from aegis.core.model import ModelSpec
from aegis.engine.packed_linear import pack, packed_linear, packs
from aegis.engine.stored_tensor import Stored
from aegis.engine.tensor_views import dtype_named, tensor_at


class Use(Enum):
    """The purpose of a weight that could be packed."""

    MULTIPLIED = auto()
    BOTH = auto()  # rows of it are looked up too


def stored(model: torch.nn.Module, uses: Mapping[str, Use]) -> Iterator[Stored]:
    """Every tensor of a loaded model once, in the order of its modules. `uses` are those of weights to pack."""
    named: dict[int, tuple[list[str], torch.Tensor, bool]] = {}
    parameters = ((name, tensor, False) for name, tensor in model.named_parameters(remove_duplicate=False))
    buffers = ((name, tensor, True) for name, tensor in model.named_buffers(remove_duplicate=False))
    for name, tensor, buffer in (*parameters, *buffers):
        named.setdefault(id(tensor), ([], tensor, buffer))[0].append(name)
    for names, tensor, buffer in named.values():
        data = tensor.detach()
        found = {name: uses.get(name) if packs(data) else None for name in names}
        if multiplied := tuple(name for name, use in found.items() if use is not None):
            packing, content = pack(data)
            yield Stored.in_rows(multiplied, data, buffer=False)._replace(content=content, packing=packing)
        if rows := tuple(name for name, use in found.items() if use is not Use.MULTIPLIED):
            yield Stored.in_rows(rows, data, buffer=buffer)


def bind(model: torch.nn.Module, spec: ModelSpec, base: int, device: torch.device) -> None:
    """Makes the tensors of `model`, which has no bytes, views of the weight range. Touches no byte there."""
    for entry in spec.manifest.tensors:
        dtype, address = dtype_named(entry.dtype), base + entry.offset
        for name in entry.names:
            owner, _, leaf = name.rpartition(".")
            place: Any = model.get_submodule(owner)
            if entry.packing:  # its rows, if they are looked up too, are another entry, further on
                place.cpu_linear = packed_linear(address, entry.shape, entry.dtype, entry.packing)
                place._parameters[leaf] = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            else:
                _become(getattr(place, leaf), tensor_at(address, entry.shape, dtype, device))


def _become(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Every holder of `tensor`, be it a module or not, holds the view from now on."""
    parameter = isinstance(tensor, torch.nn.Parameter)
    other = torch.nn.Parameter(view, requires_grad=False) if parameter else view
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
