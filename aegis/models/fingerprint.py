"""The name of a weight image: the same for the same checkpoint, dtype, image format and converter, else another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from aegis.core.model import EngineName, WeightsName
from aegis.engine.vllm import version as vllm_version
from aegis.models.checkpoint import SMALL_JSON_BYTES_MAX, TEMPLATES, VOCABULARIES, Checkpoint
from aegis.models.pooling_files import MODULES

IMAGE_FORMAT = 3

QUANTISATION = 1
"""Counts the ways in which we have chosen integers and laid them out."""

UNPACKING = 1
"""Counts the ways in which we have read checkpoints that come quantised."""

_VOCABULARIES = ("merges.txt", "vocab.txt", *(f"*{suffix}" for suffix in VOCABULARIES))
_BESIDE_WEIGHTS = ("*.json", "*.jinja", f"{TEMPLATES}/*.jinja", *_VOCABULARIES)


def fingerprint(
    checkpoint: Checkpoint,
    dtype: str,
    engine: EngineName = "transformers",
    ranks: int = 1,
    *,
    packs: bool = False,
    digests: Sequence[str] = (),
    weights: WeightsName = "dense",
) -> str:
    """32 hex digits, in milliseconds whatever the checkpoint's size: small files count by content, weights by header,
    size and time of last change. That time is ctime, which unlike mtime nobody can set back: bytes overwritten in
    place are noticed even if size and mtime were restored. A copied checkpoint gets an image of its own. Of a fetched
    one the `digests` of its weights count instead, whether these are there or not: fetched again it is the same.

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
    if weights != "dense" or checkpoint.comes_quantised:
        add("weights", weights, QUANTISATION, os.environ.get("ATEN_CPU_CAPABILITY"))  # which kernels torch has
    if checkpoint.comes_quantised:
        add("unpacked", UNPACKING)
    if ranks > 1:
        add("ranks", ranks)
    for file in [] if checkpoint.gguf else _small_files(checkpoint.directory):
        add(str(file.relative_to(checkpoint.directory)), file.read_bytes())
    own = len(checkpoint.weights)
    for file, sha256 in zip(checkpoint.weights, digests[:own], strict=True) if digests else ():
        add(file.name, sha256)
    for sha256 in digests[own:]:  # of modules behind the transformer
        add(sha256)
    for file in () if digests else checkpoint.weights:
        stat = file.stat()
        header = checkpoint.gguf.header() if checkpoint.gguf else _header(file)
        add(file.name, stat.st_size, stat.st_ctime_ns, header)
    if not digests and not checkpoint.gguf and (checkpoint.directory / MODULES).is_file():
        for file in sorted(checkpoint.directory.glob("*/model.safetensors")):
            stat = file.stat()
            add(str(file.relative_to(checkpoint.directory)), stat.st_size, stat.st_ctime_ns)
    return digest.hexdigest()


def _small_files(directory: Path) -> list[Path]:
    found = {file for pattern in _BESIDE_WEIGHTS for file in directory.glob(pattern) if file.is_file()}
    if (directory / MODULES).is_file():
        within = [file for file in directory.glob("*/config.json") if file.is_file()]
        found.update(file for file in within if file.stat().st_size <= SMALL_JSON_BYTES_MAX)
    return sorted(found)


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
