"""Tensors of a GGUF file that are integers with scales as our layers have them: they can stay what they are."""

from __future__ import annotations

import torch

from aegis.engine.quantised.integers import Integers
from aegis.models.gguf.blocks import BLOCKS, FLOATS, STAY, integers
from aegis.models.gguf.header import GgufFile
from aegis.models.gguf.tensors import StoredTensor
from aegis.models.quantised.weights import Grid, integers_of

_WEIGHT = ".weight"
_LOOKED_UP = "model.embed_tokens"


def quantised_layers(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """By the layer's name, those which are not stored as floats; embeddings are no layers that multiply."""
    return {
        name.removesuffix(_WEIGHT): tensor
        for name, tensor in tensors.items()
        if not tensor.kinds <= FLOATS and name != _LOOKED_UP + _WEIGHT
    }


def kept_integers(file: GgufFile, tensor: StoredTensor, dtype: torch.dtype) -> Integers | None:
    """None if there are no integers of ours that are the same numbers. Raises ModelRefused."""
    names = tensor.names
    place = file.tensors[names[0]]
    bits = STAY.get(place.kind)
    if bits is None or len(names) > 1 or len(place.shape) != 2:
        return None
    rows, columns = place.shape
    values, scales = (torch.from_numpy(part.copy()) for part in integers(place.kind, file.blocks(names[0])))
    groups = columns // BLOCKS[place.kind].elements
    wide = scales.float().view(rows, groups)
    if not bool(torch.isfinite(wide).all()):
        return None  # a weight that is no number, which the comparison of outputs refuses
    return integers_of(Grid(bits, tensor.in_order(values.reshape(rows, columns)), tensor.in_order(wide)), dtype)
