"""The arguments of layers that paged attention accepts: for the check of a model before it runs, and for the run.

An argument that is falsy, and no tensor, asks for nothing: it counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

HONOURED = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""Arguments of the attention call that are given their meaning. `sliding_window` w lets position q attend to
`(q - w, q]`."""

_HARMLESS = frozenset({"position_ids", "logits_to_keep", "is_causal"})  # is_causal is checked by value
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def unsupported_layers(config: PretrainedConfig) -> list[str]:
    """The types of layer that cannot be served."""
    return sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES)


def unsupported_arguments(given: Mapping[str, Any]) -> list[str]:
    """The arguments of an attention call that have no meaning here."""
    asked = {name for name, value in given.items() if isinstance(value, torch.Tensor) or value}
    return sorted(asked - HONOURED - _HARMLESS)


def attends_causally(module: torch.nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether the layer and its attention call ask for causal attention; a mask may still say something else."""
    return getattr(module, "is_causal", True) and given.get("is_causal") is not False
