"""A checkpoint loaded by transformers itself, so that every architecture's conversion of weights is theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
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
from aegis.core.model import Pooling
from aegis.engine.lean_transformers import without_compiler
from aegis.engine.pooled_models import add_dense, auto_class, without_head
from aegis.models.checkpoint import Checkpoint
from aegis.models.failures import LIBRARY_ERRORS, one_line
from aegis.models.gguf.tensors import stored_tensors
from aegis.models.kv_probe import refuse_by_config, refuse_pooling_config
from aegis.models.pooling_files import dense_directories, pools, read_pooling

_OPTIONS: Mapping[str, Any] = {
    "attn_implementation": "eager",
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,  # it is told which; otherwise only that there are some
}


def load(checkpoint: Checkpoint, dtype: str, pooling: Pooling | None = None) -> PreTrainedModel:
    """The model on the CPU with eager attention, which is the standard others are compared with.

    To be called after `refuse_by_configuration`. `dtype` is torch's name for one, or `auto` for the checkpoint's own.
    float16 stays float16: it works on every device, if slowly where a CPU has no arithmetic for it. Raises
    ModelRefused.
    """
    try:
        with without_compiler():  # a model is made first, and gets memory with its weights
            auto = AutoModelForCausalLM if pooling is None else auto_class(pooling)
            model, report = _load_gguf(checkpoint, dtype) if checkpoint.gguf else _load(auto, checkpoint, dtype)
    except LIBRARY_ERRORS as error:
        raise ModelRefused(f"transformers cannot load it: {one_line(error)}") from error
    unused = without_head(model) if pooling and not pooling.scores else ()
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(unused)):
        raise ModelRefused(f"the weights lack {missing[0]}{_and_more(missing)}")
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        told = f"{name} in another shape, {list(stored)} instead of {list(expected)}"
        raise ModelRefused(f"the weights have {told}{_and_more(mismatched)}")
    if pooling and pooling.dense:
        _load_dense(checkpoint, model, pooling)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _load_dense(checkpoint: Checkpoint, model: PreTrainedModel, pooling: Pooling) -> None:
    for directory, layer in zip(dense_directories(checkpoint), add_dense(model, pooling), strict=True):
        file = directory / "model.safetensors"
        expected = {f"linear.{name}": list(parameter.shape) for name, parameter in layer.named_parameters()}
        try:
            with safe_open(file, framework="pt") as opened:
                found = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
                if found != expected:
                    raise ModelRefused(f"{directory.name}/{file.name}: it has {found} and should have {expected}")
                for name, _ in list(layer.named_parameters()):
                    weight = opened.get_tensor(f"linear.{name}").to(model.dtype)
                    setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))
        except (*LIBRARY_ERRORS, SafetensorError) as error:
            raise ModelRefused(f"{directory.name}/{file.name}: not readable ({one_line(error)})") from error


def _load(auto: Any, checkpoint: Checkpoint, dtype: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    loaded: tuple[PreTrainedModel, dict[str, Any]] = auto.from_pretrained(
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


def refuse_by_configuration(checkpoint: Checkpoint) -> Pooling | None:
    """How it pools, if it does. Raises ModelRefused for what transformers, or paged attention, cannot make of it
    whatever the weights are."""
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
    if not pools(checkpoint):
        refuse_by_config(config)
        return None
    looks_back = refuse_pooling_config(config)
    return read_pooling(checkpoint, hidden_size=config.get_text_config().hidden_size, looks_back=looks_back)
