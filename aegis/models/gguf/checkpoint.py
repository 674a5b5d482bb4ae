"""A GGUF file as a checkpoint: opened as such, and with the files beside weights that other checkpoints have."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from aegis.core.errors import ModelRefused
from aegis.device.image_directory import CONFIG, GENERATION_CONFIG
from aegis.models.gguf.architectures import Settings, config_of
from aegis.models.gguf.blocks import Kind
from aegis.models.gguf.header import GgufFile, read_header
from aegis.models.gguf.keys import Keys

SUFFIX = ".gguf"

_DTYPES = {Kind.F32: "float32", Kind.F16: "float16"}
_OTHER_DTYPE = "bfloat16"
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def open_gguf(path: Path) -> tuple[GgufFile, Settings]:
    """The file, and the `config.json` of the same model, with the type that it runs in unless another is asked for.
    Raises ModelRefused."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelRefused("it is no file")
        file = read_header(path)
    except OSError as error:
        raise ModelRefused(f"cannot be read: {error.strerror or error}") from error
    parts = file.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelRefused(f"it is one of {parts} parts: make one file of them with `llama-gguf-split --merge`")
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise ModelRefused(f"it is no model, but of type {str(kind)[:40]!r}")
    config = config_of(Keys.of(file))
    return file, config | {"dtype": _DTYPES.get(file.kind, _OTHER_DTYPE)}


def write_config_files(config: Settings, into: Path) -> None:
    generation = {name: config[name] for name in _ENDS if config.get(name) is not None}
    (into / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    (into / GENERATION_CONFIG).write_text(json.dumps(generation), encoding="utf-8")
