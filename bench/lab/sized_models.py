"""Models of which only sizes matter: what a benchmark of memory needs of one."""

from __future__ import annotations

from aegis.core.ids import ModelId
from aegis.core.model import KvShape, Manifest, ModelSpec


def spec_of(model: ModelId, shape: KvShape, *, image_bytes: int) -> ModelSpec:
    """A model with KV of this shape, without weights."""
    manifest = Manifest(
        fingerprint="",
        architecture="",
        dtype="float32",
        image_bytes=image_bytes,
        tensors=(),
        kv=shape,
        context_tokens=1,
        vocab_size=1,
        eos_token_ids=(),
        hidden_size=1,
        intermediate_size=1,
        parameters=1,
    )
    return ModelSpec(model, manifest, "", "", "")
