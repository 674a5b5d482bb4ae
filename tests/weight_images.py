"""Weight images of which only the bytes matter."""

from __future__ import annotations

import random
from pathlib import Path

from aegis.core.ids import ModelId
from aegis.core.model import KvLayer, KvShape, Manifest, ModelSpec
from aegis.device.image_file import checksums


def content(name: str, nbytes: int) -> bytes:
    """The bytes of that image: no two pieces alike, nor two images."""
    return random.Random(name).randbytes(nbytes)


def write(directory: Path, name: str, nbytes: int) -> ModelSpec:
    """The image `name` in a file of its own, with its checksums."""
    path = directory / f"{name}.bin"
    path.write_bytes(content(name, nbytes))
    manifest = Manifest(
        fingerprint=name,
        architecture="",
        dtype="float32",
        image_bytes=nbytes,
        tensors=(),
        kv=KvShape((KvLayer(heads=1, key_dim=1, value_dim=1),), "float32", 4),
        context_tokens=1,
        vocab_size=1,
        eos_token_ids=(),
        hidden_size=1,
        intermediate_size=1,
        parameters=1,
        checksums=checksums(str(path)),
    )
    return ModelSpec(ModelId(name), manifest, "", str(path), "")


def damage(spec: ModelSpec, at: int) -> None:
    """Flips a bit of the byte at `at`."""
    damage_file(Path(spec.image_path), at)


def damage_file(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
