"""Files of checkpoints that can be fetched and opened, and that no engine could run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

_WEIGHTS = np.arange(120_000, dtype=np.float32)

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "vocab.txt": b"a\nb\n",
    "modeling_tiny.py": b"raise SystemExit",
    "README.md": b"tiny",
    "pytorch_model.bin": bytes(600_000),
    "model.safetensors": save({"weight": _WEIGHTS}),
}
_SHARDS = {f"model-0000{n}-of-00002.safetensors": save({f"weight.{n}": _WEIGHTS + n}) for n in (1, 2)}
SHARDED = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {f"weight.{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
    ).encode(),
    "consolidated.safetensors": save({"weight": _WEIGHTS}),
    **_SHARDS,
}


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
