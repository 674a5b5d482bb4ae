"""Weights as bitsandbytes stores them: 4 bits that are looked up, whose scales may be quantised too, or 8 bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from aegis.core.errors import ModelRefused
from aegis.models.quantised.checks import finite, floats, given, integers, matrix
from aegis.models.quantised.weights import Grid, Looked, Weight

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
"""A tensor that is JSON, about one layer's weight."""

_STATE_BYTES_MAX = 1 << 16
_NEIGHBOURS_MAX = 1 << 20
_LARGEST = 127


def read_bitsandbytes(tensors: Mapping[str, torch.Tensor]) -> Weight:
    if "SCB" in tensors:
        weight = matrix(tensors, "weight", torch.int8)
        scales = floats(tensors["SCB"], "SCB") / _LARGEST
        if scales.numel() != len(weight):
            raise ModelRefused(f"SCB of shape {list(scales.shape)} does not go with a weight of {list(weight.shape)}")
        return Grid(8, weight, scales.view(-1, 1))
    state = _state(tensors)
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise ModelRefused(f"its quant_state has the shape {str(shape)[:60]}, not two sizes")
    stored = given(tensors, "weight")
    stored = stored.contiguous().view(-1).view(torch.uint8)  # of whichever type it was stored
    elements = shape[0] * shape[1]
    if stored.numel() != (elements + 1) // 2:
        raise ModelRefused(f"a weight of {stored.numel()} bytes does not hold {shape} of 4 bits")
    neighbours = _count(state, "blocksize")
    scales = _scales(tensors, state, -(-elements // neighbours))
    book = floats(tensors.get("weight.quant_map"), "quant_map").view(-1)
    if len(book) != 16:
        raise ModelRefused(f"its quant_map has {len(book)} numbers, not 16")
    return Looked((shape[0], shape[1]), stored, book, scales, neighbours)


def _state(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    found = next((tensors[name] for name in STATES if name in tensors), None)
    if found is None:
        raise ModelRefused("its quant_state is missing")
    if found.dtype != torch.uint8 or found.numel() > _STATE_BYTES_MAX:
        raise ModelRefused("its quant_state is no text, or too long")
    try:
        state = json.loads(bytes(found.view(-1).tolist()))
    except (RecursionError, ValueError) as error:
        raise ModelRefused("its quant_state is not readable as JSON") from error
    if not isinstance(state, dict):
        raise ModelRefused("its quant_state is no JSON object")
    return state


def _scales(tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], count: int) -> torch.Tensor:
    absmax = given(tensors, "weight.absmax").view(-1)
    if len(absmax) != count:
        raise ModelRefused(f"its absmax has {len(absmax)} scales, not {count}")
    if "weight.nested_absmax" not in tensors:
        return floats(absmax, "absmax")
    places = integers(absmax, "absmax", (0, 255)).int()
    neighbours = _count(state, "nested_blocksize")
    nested = floats(tensors["weight.nested_absmax"], "nested_absmax").view(-1)
    book = floats(tensors.get("weight.nested_quant_map"), "nested_quant_map").view(-1)
    offset = state.get("nested_offset")
    if len(nested) != -(-count // neighbours) or len(book) != 256 or not isinstance(offset, int | float):
        raise ModelRefused("its nested_absmax, nested_quant_map and nested_offset do not go with its absmax")
    return finite(book[places] * nested[torch.arange(count) // neighbours] + offset, "absmax")


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or not 0 < value <= _NEIGHBOURS_MAX:
        raise ModelRefused(f"its quant_state has the {name} {str(value)[:60]}")
    return value
