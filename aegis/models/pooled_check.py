"""A model that pools, as an engine runs it, compared with transformers' own run, once, when it is registered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from aegis.core.errors import ModelRefused
from aegis.core.ids import RequestId
from aegis.core.model import ModelSpec
from aegis.core.request import Sampling
from aegis.core.rng import Stream
from aegis.engine.pooled_models import PooledModel, Text
from aegis.engine.protocol import Engine, KvRegion, StepRow
from aegis.models.failures import LIBRARY_ERRORS, one_line

_LENGTHS = 3, 5, 17, 33
_TOLERANCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""Largest difference of a vector from the reference, of the reference's length."""


def check(spec: ModelSpec, model: PreTrainedModel, make_engine: Callable[..., Engine]) -> None:
    """Runs texts of several lengths in one step, and compares them with those that `model` runs one by one with eager
    attention. Raises ModelRefused."""
    manifest, draws = spec.manifest, Stream(0, "self-check")
    assert manifest.pooling is not None
    lengths = [min(length, manifest.context_tokens) for length in _LENGTHS]
    texts = [tuple(draws.below(manifest.vocab_size) for _ in range(length)) for length in lengths]
    reference = PooledModel(model, manifest.pooling)
    try:
        expected = torch.cat([reference.vectors([Text(text)]) for text in texts])
    except LIBRARY_ERRORS as error:
        raise ModelRefused(f"{type(model).__name__} fails when it is run: {one_line(error)}") from error
    apart = torch.linalg.vector_norm(_run(spec, texts, make_engine) - expected, dim=-1)
    worst = float((apart / _size(expected)).max())
    if not worst <= _TOLERANCE[manifest.dtype]:  # a NaN is no agreement either
        raise ModelRefused(
            f"its vectors are not what transformers computes: they differ by {worst:.2g} of their length"
        )


def _size(expected: torch.Tensor) -> torch.Tensor:
    """A score of nought is no reason to divide by it."""
    lengths: torch.Tensor = torch.linalg.vector_norm(expected, dim=-1)
    return lengths.clamp_min(1.0 if expected.shape[-1] == 1 else 1e-9)


def _run(spec: ModelSpec, texts: list[tuple[int, ...]], make_engine: Callable[..., Engine]) -> torch.Tensor:
    weights = np.memmap(spec.image_path, mode="c")
    engine = make_engine(KvRegion(0, 0, 1))
    engine.attach(spec, weights.ctypes.data)
    for number, text in enumerate(texts):
        engine.start(spec.model, RequestId(number), text, (), Sampling(max_tokens=1, pools=True))
    rows = [StepRow(RequestId(number), text, 0, np.empty(0, np.int64)) for number, text in enumerate(texts)]
    vectors = [np.frombuffer(made.token.vector or b"", "<f4") for made in engine.step(spec.model, rows) if made]
    engine.detach(spec.model)
    return torch.from_numpy(np.stack(vectors))
