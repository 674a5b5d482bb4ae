"""The contents of an image directory, and whether it is whole. Without torch, because the proxy reads it too."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from aegis.core.model import Manifest, image_name

MANIFEST = "manifest.json"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
DETOKENIZER = "detokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"


def read_manifest(directory: Path, fingerprint: str) -> Manifest | None:
    """The manifest of a whole image with this fingerprint; None if there is none or anything about it is off."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
        sizes = {(directory / image_name(rank)).stat().st_size for rank in range(manifest.ranks)}
        whole = sizes == {manifest.image_bytes}
        json.loads((directory / CONFIG).read_bytes())  # which instances read; it may hold NaN, as transformers writes
    except (OSError, RecursionError, ValueError, msgspec.MsgspecError):
        return None
    return manifest if whole and manifest.fingerprint == fingerprint else None
