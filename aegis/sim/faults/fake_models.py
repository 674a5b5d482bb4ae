"""Fake models: what they say follows from the whole sequence before it, so a wrong KV entry shows."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from aegis.core.ids import ModelId
from aegis.core.model import KvLayer, KvShape, Manifest, ModelSpec, Slo
from aegis.core.request import Sampling

PAGE = 1 << 21
END_TOKEN = 7
BLOCK_TOKENS = 16


def next_token(sequence: Sequence[int | None]) -> int:
    """The token that the fake model gives after `sequence`."""
    return int.from_bytes(blake2b(repr(tuple(sequence)).encode(), digest_size=2).digest(), "little") % 50


def reference(prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    """The undisturbed answer."""
    tokens: list[int] = []
    while not tokens or (len(tokens) < sampling.max_tokens and tokens[-1] not in sampling.stop_token_ids):
        tokens.append(next_token((*prompt, *tokens)))
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
