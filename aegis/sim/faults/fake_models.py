"""Fake models: what they say follows from the whole sequence before it, so a wrong KV entry shows."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from msgspec.structs import replace

from aegis.core.ids import ModelId
from aegis.core.model import Adapter, KvLayer, KvShape, Manifest, ModelSpec, Slo
from aegis.core.request import Sampling

PAGE = 1 << 21
END_TOKEN = 7
BLOCK_TOKENS = 16


def next_token(sequence: Sequence[object]) -> int:
    """The token that the fake model gives after `sequence`."""
    return int.from_bytes(blake2b(repr(tuple(sequence)).encode(), digest_size=2).digest(), "little") % 50


def reference(prompt: tuple[int, ...], sampling: Sampling, adapter: ModelId | None = None) -> list[int]:
    """The undisturbed answer."""
    tokens: list[int] = []
    while not tokens or (len(tokens) < sampling.max_tokens and tokens[-1] not in sampling.stop_token_ids):
        sequence = (*prompt, *tokens)
        tokens.append(next_token(sequence if adapter is None else [(token, adapter) for token in sequence]))
    return tokens


def make_shape(block_bytes: int) -> KvShape:
    """One layer and one head; `block_bytes` must be a multiple of 128."""
    shape = KvShape((KvLayer(1, block_bytes // 128, block_bytes // 128),), "float32", 4, BLOCK_TOKENS)
    assert shape.block_bytes == block_bytes
    return shape


def make_spec(index: int, *, image_pages: int, block_bytes: int, slo: Slo | None = None) -> ModelSpec:
    """Model `m{index}`."""
    manifest = Manifest(
        fingerprint=str(index),
        architecture="None",
        dtype="float32",
        image_bytes=image_pages * PAGE - 5,
        tensors=(),
        kv=make_shape(block_bytes),
        context_tokens=4096,
        vocab_size=50,
        eos_token_ids=(END_TOKEN,),
        hidden_size=64,
        intermediate_size=128,
        parameters=1_000_000,
    )
    return ModelSpec(ModelId(f"m{index}"), manifest, "", "", "", slo or Slo())


def make_adapter(index: int, base: ModelSpec, *, image_pages: int = 1) -> ModelSpec:
    """Adapter `a{index}` of the base."""
    adapter = Adapter(base.manifest.fingerprint, rank=8, scale=1.0)
    own = replace(
        base.manifest, fingerprint=f"a{index}", image_bytes=image_pages * PAGE - 5, parameters=1000, adapter=adapter
    )
    return replace(base, model=ModelId(f"a{index}"), manifest=own, base=base.model)
