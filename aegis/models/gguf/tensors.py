"""The tensors of a GGUF file under the names and in the form that transformers has them, made when they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from aegis.core.errors import ModelRefused
from aegis.models.gguf.architectures import Architecture, architecture_of
from aegis.models.gguf.blocks import BLOCKS, Array, Kind, dequantized
from aegis.models.gguf.header import GgufFile
from aegis.models.gguf.keys import Keys
from aegis.models.gguf.rope_factors import NAMES

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")
_ELSEWHERE = re.compile(r"(\w+)\.(weight|bias)")

CHUNK_ELEMENTS = 1 << 18
"""Dequantised at a time, in float32."""

Change = Callable[[torch.Tensor], torch.Tensor]


class StoredTensor:
    """Stands for a tensor of a checkpoint where transformers loads it: any index gives the whole. Several of the file
    are one after the other in it, for each expert."""

    __slots__ = ("_change", "_dtype", "_file", "_names")

    def __init__(self, file: GgufFile, names: Sequence[str], dtype: torch.dtype, change: Change | None) -> None:
        self._file = file
        self._names = names
        self._dtype = dtype
        self._change = change

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(self._file.tensors[name].kind for name in self._names)

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as transformers has them; only of a matrix, of which nothing else changes."""
        return self._change(rows) if self._change else rows

    def __getitem__(self, _: object) -> torch.Tensor:
        first, *others = [
            dequantize(self._file, name, torch.float32 if self._change else self._dtype) for name in self._names
        ]
        if others:
            return torch.cat([first, *others], dim=1)
        return self._change(first).to(self._dtype) if self._change else first


def dequantize(file: GgufFile, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in `dtype`, with no more beside it than some of its rows in float32."""
    place = file.tensors[name]
    blocks = file.blocks(name)
    step = max(1, CHUNK_ELEMENTS // BLOCKS[place.kind].elements)
    made = torch.empty(place.elements, dtype=dtype)
    at = 0
    for start in range(0, len(blocks), step):
        values: Array = dequantized(place.kind, blocks[start : start + step])
        made[at : at + values.size] = torch.from_numpy(values.reshape(-1))
        at += values.size
    return made.reshape(place.shape)


def stored_tensors(file: GgufFile, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """By transformers' names. Raises ModelRefused for a tensor that its architecture does not have."""
    keys = Keys.of(file)
    architecture = architecture_of(keys)
    named: dict[str, list[str]] = {}
    for own in sorted(file.tensors):  # gates come before what they gate
        if own not in NAMES:
            named.setdefault(_name(architecture, own), []).append(own)
    return {
        name: StoredTensor(file, owns, dtype, _change(architecture, keys, owns[0], file.tensors[owns[0]].shape))
        for name, owns in named.items()
    }


def _name(architecture: Architecture, own: str) -> str:
    if (found := _IN_LAYER.fullmatch(own)) and (inside := architecture.layer.get(found[2])):
        return f"model.layers.{found[1]}.{inside}.{found[3]}"
    if found and found[3] == "weight" and (experts := architecture.experts.get(found[2])):
        return f"model.layers.{found[1]}.{experts}"
    if (found := _ELSEWHERE.fullmatch(own)) and (outside := _OUTSIDE.get(found[1])):
        return f"{outside}.{found[2]}"
    raise ModelRefused(f"it has a tensor {own!r}, which is not known in a {architecture.model_type}")


def _change(architecture: Architecture, keys: Keys, own: str, shape: tuple[int, ...]) -> Change | None:
    found = _IN_LAYER.fullmatch(own)
    part = found[2] if found else ""
    if architecture.interleaved and part in ("attn_q", "attn_k"):
        heads = keys.count("attention.head_count")
        count = heads if part == "attn_q" else keys.count("attention.head_count_kv", heads)
        if shape[0] % (2 * count):
            raise ModelRefused(f"{own} has {shape[0]} rows, which {count} heads cannot share")
        return lambda tensor: halves_first(tensor, count)
    if architecture.offset and own.endswith("norm.weight"):
        return lambda tensor: tensor - 1
    return None


def halves_first(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head that are pairs, (0, n/2), (1, n/2 + 1), ...: the first of all pairs, and then the second."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
