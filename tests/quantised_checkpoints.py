"""Checkpoints that come quantised, made from tiny ones in each format, and the models that they stand for.

Words are packed here bit by bit, in loops, as the formats are specified: nothing of the code under test is used. Where
the package that makes a format runs without a GPU, `tests/unit/models/quantised/test_packages.py` uses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests import checkpoints

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""Groups of 128 divide its rows."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


class Layer(NamedTuple):
    """The tensors of a layer by what follows its name, and the float32 weight that they stand for."""

    tensors: Tensors
    weight: torch.Tensor


Pack = Callable[[torch.Tensor], Layer]


def words_of(rows: list[list[int]], bits: int) -> torch.Tensor:
    """int32: the numbers of each row one after the other, the lowest bit first."""
    made = []
    for row in rows:
        stream = 0
        for at, number in enumerate(row):
            assert 0 <= number < 1 << bits
            stream |= number << at * bits
        count = -(-len(row) * bits // 32)
        words = [stream >> 32 * at & 0xFFFFFFFF for at in range(count)]
        made.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(made, dtype=torch.int32)


class Numbers(NamedTuple):
    """`values` of `[out, in]` and `zeros` `[out, groups]` from 0 on; `groups` says which each column has."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        return (self.values - self.zeros[:, self.groups]) * self.scales.float()[:, self.groups]


def numbers(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, groups: torch.Tensor | None = None
) -> Numbers:
    """Rounded to the nearest, with scales of float16."""
    columns = weight.shape[1]
    size = columns if group == -1 else group
    groups = torch.arange(columns) // size if groups is None else groups
    most = (1 << bits) - 1
    scales, zeros = [], []
    for at in range(columns // size):
        part = weight[:, groups == at]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).half()
        scales.append(scale)
        lowest = (-low / scale.float()).round().clamp(1, most)
        zeros.append(torch.full_like(low, (most + 1) // 2) if symmetric else lowest)
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1).int()
    values = (weight / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, most).int()
    return Numbers(values, scale, zero, groups)


def gptq(bits: int = 4, group: int = 128, *, symmetric: bool = True, less: int = 1, shuffled: bool = False) -> Pack:
    """`less` is what format 1 takes from each zero point; `shuffled` are groups in the order of activations."""

    def pack(weight: torch.Tensor) -> Layer:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(3)) if shuffled else None
        made = numbers(weight, bits, group, symmetric=symmetric, groups=order // size if shuffled else None)
        tensors = {
            "qweight": words_of(made.values.tolist(), bits).t().contiguous(),
            "qzeros": words_of((made.zeros.t() - less).tolist(), bits),
            "scales": made.scales.t().contiguous(),
            "g_idx": made.groups.int(),
        }
        return Layer(tensors, made.weight)

    return pack


def awq(group: int = 128) -> Pack:
    def ordered(rows: list[list[int]]) -> list[list[int]]:
        return [[row[at + place] for at in range(0, len(row), 8) for place in _AWQ_ORDER] for row in rows]

    def pack(weight: torch.Tensor) -> Layer:
        made = numbers(weight, 4, group, symmetric=False)
        tensors = {
            "qweight": words_of(ordered(made.values.t().tolist()), 4),
            "qzeros": words_of(ordered(made.zeros.t().tolist()), 4),
            "scales": made.scales.t().contiguous(),
        }
        return Layer(tensors, made.weight)

    return pack


def packed(bits: int = 4, group: int = 128, *, symmetric: bool = True) -> Pack:
    """compressed-tensors' pack-quantized."""

    def pack(weight: torch.Tensor) -> Layer:
        made = numbers(weight, bits, group, symmetric=symmetric)
        tensors = {
            "weight_packed": words_of(made.values.tolist(), bits),
            "weight_scale": made.scales.clone(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_of(made.zeros.t().tolist(), bits).t().contiguous()
        return Layer(tensors, made.weight)

    return pack


def int8(*, symmetric: bool = True) -> Pack:
    """compressed-tensors' int-quantized and naive-quantized: a scale a row."""

    def pack(weight: torch.Tensor) -> Layer:
        made = numbers(weight, 8, -1, symmetric=symmetric)
        tensors = {"weight": (made.values - 128).to(torch.int8), "weight_scale": made.scales.clone()}
        if not symmetric:
            tensors["weight_zero_point"] = (made.zeros - 128).to(torch.int8)
        return Layer(tensors, made.weight)

    return pack


def fp8(block: tuple[int, int] | None = (128, 128), name: str = "weight_scale_inv") -> Pack:
    """A scale for each block, or for each row."""

    def pack(weight: torch.Tensor) -> Layer:
        rows, columns = weight.shape
        high, wide = block or (1, columns)
        scales = torch.zeros(-(-rows // high), -(-columns // wide))
        stored, whole = torch.zeros_like(weight), torch.zeros_like(weight)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                part = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scales[i, j] = weight[part].abs().max() / 448
                stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn).float()
                whole[part] = stored[part] * scales[i, j]
        return Layer({"weight": stored.to(torch.float8_e4m3fn), name: scales}, whole)

    return pack


def compressed_config(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            yield name, module


def write(
    directory: Path,
    model_type: str,
    settings: dict[str, Any],
    pack: Pack,
    *,
    damage: Callable[[Tensors], None] | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Returns the dense model that the checkpoint stands for, in float32. `damage` is done to its tensors."""
    model = checkpoints.model(model_type, **(WIDE | changes))
    tied = bool(model.config.tie_word_embeddings)
    stored = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    for name, layer in linear_layers(model):
        made = pack(layer.weight.data)
        layer.weight.data = made.weight.clone()
        del stored[f"{name}.weight"]
        stored |= {f"{name}.{leaf}": tensor for leaf, tensor in made.tensors.items()}
    if damage:
        damage(stored)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": settings, "dtype": "float16"}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model
