"""The name of a weight image: the same for the same checkpoint, dtype, image format and converter, else another."""

from __future__ import annotations

import os
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from aegis.core.model import EngineName, WeightsName
from aegis.engine.vllm import version as vllm_version
from aegis.models.checkpoint import Checkpoint

IMAGE_FORMAT = 2

QUANTISATION = 1
"""Counts the ways in which we have chosen integers and laid them out."""

_BESIDE_WEIGHTS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


def fingerprint(
    checkpoint: Checkpoint,
    dtype: str,
    engine: EngineName = "transformers",
    ranks: int = 1,
    *,
    packs: bool = False,
    weights: WeightsName = "dense",
) -> str:
    """32 hex digits, in milliseconds whatever the checkpoint's size: small files count by content, weights by header,
    size and time of last change. That time is ctime, which unlike mtime nobody can set back: bytes overwritten in
    place are noticed even if size and mtime were restored. A copied checkpoint gets an image of its own.

    The converter counts because the layout of its parameters may differ from release to release; if it `packs`
    weights for the processor, that too, and torch. So does how `weights` are quantised.
    """
    digest = blake2b(digest_size=16)

    def add(*parts: object) -> None:
        digest.update(repr(parts).encode())

    add("aegis image", IMAGE_FORMAT, dtype, version("transformers"))
    if engine == "vllm":
        add(engine, vllm_version.installed(), version("torch"), _processor())
    elif packs:
        add("packed", version("torch"), _processor())
    if weights != "dense":
        add("weights", weights, QUANTISATION, os.environ.get("ATEN_CPU_CAPABILITY"))  # which kernels torch has
    if ranks > 1:
        add("ranks", ranks)
    for file in _small_files(checkpoint.directory):
        add(file.name, file.read_bytes())
    for file in checkpoint.weights:
        stat = file.stat()
        add(file.name, stat.st_size, stat.st_ctime_ns, _header(file))
    return digest.hexdigest()


def _small_files(directory: Path) -> list[Path]:
    return sorted({file for pattern in _BESIDE_WEIGHTS for file in directory.glob(pattern) if file.is_file()})


def _processor() -> tuple[str, ...]:
    """The features of the processor, as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    return tuple(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


def _header(file: Path) -> bytes:
    with file.open("rb") as opened:
        nbytes = int.from_bytes(opened.read(8), "little")
        return opened.read(nbytes)
