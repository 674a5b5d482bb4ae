"""A checkpoint loaded by transformers itself, so that every architecture's conversion of weights is theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from aegis.core.errors import ModelRefused
from aegis.engine.lean_transformers import without_compiler
from aegis.models.checkpoint import Checkpoint
from aegis.models.failures import LIBRARY_ERRORS, one_line
from aegis.models.gguf.tensors import stored_tensors
from aegis.models.kv_probe import refuse_by_config

_OPTIONS: Mapping[str, Any] = {
    "attn_implementation": "eager",
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,  # it is told which; otherwise only that there are some
}


def load(checkpoint: Checkpoint, dtype: str) -> PreTrainedModel:
    """The model on the CPU with eager attention, which is the standard others are compared with.

    To be called after `refuse_by_configuration`. `dtype` is torch's name for one, or `auto` for the checkpoint's own.
    float16 stays float16: it works on every device, if slowly where a CPU has no arithmetic for it. Raises
    ModelRefused.
    """
    try:
        with without_compiler():  # a model is made first, and gets memory with its weights
            model, report = _load_gguf(checkpoint, dtype) if checkpoint.gguf else _load(checkpoint, dtype)
    except LIBRARY_ERRORS as error:
        raise ModelRefused(f"transformers cannot load it: {one_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelRefused(f"the weights lack {missing[0]}{_and_more(missing)}")
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        told = f"{name} in another shape, {list(stored)} instead of {list(expected)}"
        raise ModelRefused(f"the weights have {told}{_and_more(mismatched)}")
    loaded: PreTrainedModel = model.eval()
    return loaded


def _load(checkpoint: Checkpoint, dtype: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    loaded: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
        checkpoint.directory,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        **_OPTIONS,
    )
    return loaded


def _load_gguf(checkpoint: Checkpoint, dtype: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    assert checkpoint.gguf
    config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False, local_files_only=True)
    runs_in = getattr(torch, checkpoint.config["dtype"] if dtype == "auto" else dtype)
    tensors = stored_tensors(checkpoint.gguf, runs_in)
    loaded: tuple[PreTrainedModel, dict[str, Any]] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=tensors, dtype=runs_in, **_OPTIONS
    )
    if unknown := sorted(loaded[1]["unexpected_keys"]):
        raise ModelRefused(f"the model has no place for {unknown[0]}{_and_more(unknown)}")
    loaded[0].generation_config = GenerationConfig.from_pretrained(checkpoint.directory, local_files_only=True)
    return loaded


def _and_more(found: Sequence[object]) -> str:
    return f", and {len(found) - 1} more" if len(found) > 1 else ""


def refuse_by_configuration(checkpoint: Checkpoint) -> None:
    """Raises ModelRefused for what transformers, or paged attention, cannot make of it whatever the weights are."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False, local_files_only=True)
    except (*LIBRARY_ERRORS, StrictDataclassError) as error:
        kind = checkpoint.config.get("model_type")
        known = f"transformers knows no such model (model_type {kind!r})" if kind else "config.json has no model_type"
        if kind in CONFIG_MAPPING:
            known = f"config.json is not of a {kind}"
        raise ModelRefused(f"{known}: {one_line(error)}") from error
    refuse_by_config(config)
