"""A checkpoint directory as found: its configuration and its safetensors files, both known to be readable.

Everything here is decided without torch, from a few kilobytes: what is broken is refused before anything is loaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from msgspec import Struct
from safetensors import SafetensorError, safe_open

from aegis.core.errors import ModelRefused
from aegis.models.checkpoint_files import refuse_odd_files
from aegis.models.failures import one_line

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LAYER_COUNT = re.compile(r"(?:n|num)_(?:\w+_)?layers?|(?:de|en)coder_layers")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Checkpoint(Struct, frozen=True):
    directory: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]  # sorted by name


def open_checkpoint(directory: Path) -> Checkpoint:
    """Raises ModelRefused for a missing or unreadable configuration, and for weights that are pickled, missing,
    truncated or not what their headers or their index say. The reason does not repeat the directory."""
    if not directory.is_dir():
        raise ModelRefused("no such directory")
    refuse_odd_files(directory)
    if not (directory / "config.json").is_file():
        raise ModelRefused("there is no config.json, so it is not a checkpoint")
    config = _read_json(directory / "config.json")
    if named := config.get("transformers_weights"):
        raise ModelRefused(f"config.json: transformers_weights is {named!r}; only {_SINGLE} or {_INDEX} are read")
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        expected: dict[Path, set[str]] = {directory / _SINGLE: set()}
    elif index.is_file():
        expected = _read_index(index)
    else:
        raise ModelRefused(_why_no_weights(directory))
    tensors = sum(_check_weights(file, named) for file, named in expected.items())
    _refuse_more_layers(config, tensors)
    return Checkpoint(directory, config, tuple(sorted(expected)))


def _why_no_weights(directory: Path) -> str:
    pickled = sorted(file.name for pattern in _PICKLED for file in directory.glob(pattern))
    if pickled:
        return f"its weights are pickled ({pickled[0]}), which can run any code: convert them to safetensors"
    return f"there are no weights: expected {_SINGLE} or {_INDEX}"


def _read_index(index: Path) -> dict[Path, set[str]]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelRefused(f"{index.name}: it has no weight_map")
    expected: dict[Path, set[str]] = {}
    for tensor, shard in sorted(weight_map.items()):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelRefused(f"{index.name}: {shard!r} is not the name of a file beside it")
        expected.setdefault(index.parent / shard, set()).add(tensor)
    for file in expected:
        if not file.is_file():
            raise ModelRefused(f"the shard {file.name}, named in {_INDEX}, is missing")
    return expected


def _refuse_more_layers(config: dict[str, Any], tensors: int) -> None:
    """Making the model would take time and memory for each of them."""
    inner = [part for part in config.values() if isinstance(part, dict)]
    for part in [config, *inner]:
        for name, value in part.items():
            if _LAYER_COUNT.fullmatch(name) and isinstance(value, int) and value > tensors:
                raise ModelRefused(f"config.json: {name} is {value}, and there are {tensors} tensors in all")


def _check_weights(file: Path, expected: set[str]) -> int:
    """How many tensors it holds."""
    try:
        with safe_open(file, framework="numpy") as opened:
            found = set(opened.keys())
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ModelRefused(f"{file.name}: truncated or not a safetensors file ({reason}); fetch it again") from error
    if missing := sorted(expected - found):
        raise ModelRefused(f"{file.name}: the tensor {missing[0]}, which {_INDEX} places here, is not in it")
    if not found:
        raise ModelRefused(f"{file.name}: it holds no tensors")
    return len(found)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ModelRefused(f"{file.name}: not readable as JSON: {one_line(error)}") from error
    if not isinstance(tree, dict):
        raise ModelRefused(f"{file.name}: expected a JSON object")
    return tree
