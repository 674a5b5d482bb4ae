"""A checkpoint loaded by transformers itself, so that every architecture's conversion of weights is theirs."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from aegis.core.errors import ModelRefused
from aegis.models.checkpoint import Checkpoint
from aegis.models.failures import LIBRARY_ERRORS, one_line
from aegis.models.probe import refuse_by_config

_UNRESOLVED = ("missing_keys", "mismatched_keys")


def load(checkpoint: Checkpoint, dtype: str) -> PreTrainedModel:
    """The model on the CPU with eager attention, which is the standard others are compared with.

    `dtype` is torch's name for one, or `auto` for the checkpoint's own. float16 stays float16: it works on every
    device, if slowly where a CPU has no arithmetic for it. Raises ModelRefused.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _refuse_early(checkpoint)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.directory,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except LIBRARY_ERRORS as error:
        raise ModelRefused(f"transformers cannot load it: {one_line(error)}") from error
    if lacking := sorted(str(key) for kind in _UNRESOLVED for key in report[kind]):
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ModelRefused(f"the weights lack {lacking[0]}{more}, or have it in another shape")
    loaded: PreTrainedModel = model.eval()
    return loaded


def _refuse_early(checkpoint: Checkpoint) -> None:
    try:
        config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False, local_files_only=True)
    except LIBRARY_ERRORS as error:
        kind = checkpoint.config.get("model_type")
        known = f"transformers knows no such model (model_type {kind!r})" if kind else "config.json has no model_type"
        if kind in CONFIG_MAPPING:
            known = f"config.json is not of a {kind}"
        raise ModelRefused(f"{known}: {one_line(error)}") from error
    refuse_by_config(config)
