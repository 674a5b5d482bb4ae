"""Checkpoint to weight image by vLLM's own loader, for vLLM's layers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from aegis.core.errors import ModelRefused
from aegis.core.model import KvShape, Manifest
from aegis.engine.vllm import adapter
from aegis.engine.vllm.weights import stored
from aegis.models.kv_probe import context_tokens
from aegis.models.weight_image import write_stored

BLOCK_TOKENS = 32
"""The least that its attention on CPUs works with."""


def write_vllm_image(model: PreTrainedModel, fingerprint: str, checkpoint: Path, into: Path) -> Manifest:
    """As `write_image` does. Raises ModelRefused if vLLM, or the engine over it, cannot serve the checkpoint."""
    try:
        return _write(model, fingerprint, checkpoint, into)
    except ModelRefused as refusal:
        raise ModelRefused(f"{refusal.message}; the transformers engine may serve it") from refusal


def _write(model: PreTrainedModel, fingerprint: str, checkpoint: Path, into: Path) -> Manifest:
    dtype = str(model.dtype).removeprefix("torch.")
    context = context_tokens(model.config)
    config = adapter.configure(checkpoint, dtype=dtype, context_tokens=context, block_tokens=BLOCK_TOKENS)
    loaded = adapter.load(config)
    kv = KvShape(adapter.kv_layers(config), dtype, model.dtype.itemsize, BLOCK_TOKENS)
    with torch.inference_mode():
        tensors = list(stored(loaded, adapter.uses(loaded)))
    vocab_size = model.config.get_text_config().vocab_size
    return write_stored([tensors], model, kv, vocab_size, fingerprint, checkpoint, into, engine="vllm")
