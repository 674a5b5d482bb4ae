"""LoRA adapters in PEFT's format, made on the spot, and what they make of their base, merged by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from aegis.engine.lean_transformers import import_transformers

import_transformers()

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

TARGETS = ("q_proj", "v_proj", "down_proj")
WEIGHTS, CONFIGURATION = "adapter_model.safetensors", "adapter_config.json"


def write(
    directory: Path,
    base: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    targets: Sequence[str] = TARGETS,
    std: float = 0.2,
    named: str | None = None,
    **changes: Any,
) -> Path:
    """An adapter of the checkpoint `base`, whose outputs differ clearly from its base's. Its configuration names
    `named`, if not the directory of its base; `changes` override the rest."""
    directory.mkdir(parents=True)
    tree = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base) if named is None else named,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }
    (directory / CONFIGURATION).write_text(json.dumps(tree | changes))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (outputs, inputs) in _targeted(AutoModelForCausalLM.from_pretrained(base), targets).items():
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            key = f"base_model.model.{path}.lora_{part}.weight"
            tensors[key] = torch.randn(shape, generator=generator) * std
    save_file(tensors, directory / WEIGHTS)
    return directory


def _targeted(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    found = {}
    for path, layer in model.named_modules():
        if path.rpartition(".")[2] in targets:
            shape = tuple(layer.weight.shape)
            found[path] = shape[::-1] if isinstance(layer, Conv1D) else shape
    return found


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(directory / WEIGHTS))


def replace_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS)


def merged(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The base with `W + s B A` in place of each weight that the adapter changes."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    merge_into(model, adapter)
    return model


def merge_into(model: PreTrainedModel, adapter: Path) -> None:
    tree = json.loads((adapter / CONFIGURATION).read_text())
    scale = tree["lora_alpha"] / (sqrt(tree["r"]) if tree["use_rslora"] else tree["r"])
    tensors = tensors_of(adapter)
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                layer = model.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A.")[0])
                change = scale * (tensors[name.replace(".lora_A.", ".lora_B.")] @ down)
                layer.weight += change.T if isinstance(layer, Conv1D) else change
