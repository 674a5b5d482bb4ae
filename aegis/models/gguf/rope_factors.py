"""Rotary frequencies that a file gives as numbers: a tensor of factors by which each of them is divided.

llama.cpp works them out when it converts a model, and what they come from is lost. Those of Llama 3 are recognised:
transformers has a rule for them, by which the frequencies of a position do not depend on what follows it. Others are
written as a LongRoPE whose factors are the same for short and long texts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aegis.core.errors import ModelRefused
from aegis.models.gguf.blocks import Array, dequantized
from aegis.models.gguf.header import GgufFile

FACTORS = "rope_freqs.weight"
SHORT_FACTORS = "rope_factors_short.weight"
LONG_FACTORS = "rope_factors_long.weight"
NAMES = frozenset({FACTORS, SHORT_FACTORS, LONG_FACTORS})

FACTORS_MAX = 4096
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all models that it was used for."""

_ALIKE = 1e-4


def factors_in(file: GgufFile, name: str) -> list[float]:
    """Raises ModelRefused for what no factors are."""
    place = file.tensors[name]
    if len(place.shape) != 1 or place.elements > FACTORS_MAX:
        raise ModelRefused(f"{name} should be one row of at most {FACTORS_MAX} factors")
    values = dequantized(place.kind, file.blocks(name)).reshape(-1)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ModelRefused(f"{name} should have positive numbers only")
    return [float(value) for value in values]


def rope_of_factors(factors: list[float], theta: float, context: int) -> dict[str, Any]:
    """transformers' `rope_parameters`."""
    factor = max(factors)
    expected = _llama3_factors(len(factors), factor, theta)
    if factor > 1 and np.allclose(factors, expected, rtol=_ALIKE, atol=0):
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor} | _LLAMA3
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": context,
    }


def _llama3_factors(count: int, factor: float, theta: float) -> Array:
    """Long waves are divided by the factor, short ones stay, and those between are in between."""
    waves = 2 * np.pi * np.float64(theta) ** (np.arange(count) / count)
    old, low, high = (
        _LLAMA3[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    share = np.clip((old / waves - low) / (high - low), 0, 1)
    mixed: Array = 1 / ((1 - share) / factor + share)
    return mixed
