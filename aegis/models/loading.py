"""A checkpoint loaded by transformers itself, so that every architecture's conversion of weights is theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

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
from transformers.integrations import peft
from transformers.models.auto import auto_factory
from transformers.utils import logging

from aegis.core.errors import ModelRefused
from aegis.core.model import Pooling
from aegis.device.image_directory import GENERATION_CONFIG
from aegis.engine.lean_transformers import without_compiler
from aegis.engine.pooled_models import add_dense, auto_class, without_head
from aegis.engine.quantised.integers import Integers
from aegis.models.checkpoint import Checkpoint, refuse_empty_sizes
from aegis.models.failures import LIBRARY_ERRORS, one_line
from aegis.models.gguf.kept_integers import kept_integers, quantised_layers
from aegis.models.gguf.tensors import StoredTensor, stored_tensors
from aegis.models.kv_probe import refuse_by_config, refuse_pooling_config
from aegis.models.pooling_files import dense_directories, pools, read_pooling
from aegis.models.quantised.configuration import Scheme, scheme_of
from aegis.models.quantised.kept import kept, runs_as
from aegis.models.quantised.tensors import Stored, of_integers, unpack

_OPTIONS: Mapping[str, Any] = {
    "attn_implementation": "eager",
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,  # it is told which; otherwise only that there are some
}


_DTYPES = ("bfloat16", "float16", "float32")
_OTHERWISE = "bfloat16"
"""What a quantised checkpoint runs in that does not say."""


class Loaded(NamedTuple):
    """`integers` are those of layers that stay quantised as they came; the weights of `model` are what they stand for.
    `came` is what the checkpoint was, and `note` also says what it runs as."""

    model: PreTrainedModel
    integers: Mapping[str, Integers] = {}
    came: str = ""
    note: str = ""


class _Read(NamedTuple):
    """By transformers, with its report. `layers` came quantised, and of some there are `integers`."""

    model: PreTrainedModel
    report: dict[str, Any]
    integers: Mapping[str, Integers] = {}
    layers: Collection[str] = ()
    came: str = ""


def load(checkpoint: Checkpoint, dtype: str, pooling: Pooling | None = None, *, keeps: bool = False) -> Loaded:
    """The model on the CPU with eager attention, which is the standard others are compared with.

    To be called after `refuse_by_configuration`. `dtype` is torch's name for one, or `auto` for the checkpoint's own.
    float16 stays float16: it works on every device, if slowly where a CPU has no arithmetic for it. If it `keeps`
    integers, those of a quantised checkpoint are given as they are, where layers can have them. Raises ModelRefused.
    """
    scheme = scheme_of(checkpoint.config)
    try:
        with without_compiler(), _without_adapters():  # a model is made first, and gets memory with its weights
            auto = AutoModelForCausalLM if pooling is None else auto_class(pooling)
            if checkpoint.gguf:
                read = _load_gguf(checkpoint, dtype, keeps=keeps)
            elif scheme:
                read = _load_quantised(auto, checkpoint, scheme, dtype, keeps=keeps)
            else:
                read = _load(auto, checkpoint, dtype)
    except LIBRARY_ERRORS as error:
        raise ModelRefused(f"transformers cannot load it: {one_line(error)}") from error
    model, report = read.model, read.report
    unused = without_head(model) if pooling and not pooling.scores else ()
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(unused)):
        raise ModelRefused(f"the weights lack {missing[0]}{_and_more(missing)}")
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        told = f"{name} in another shape, {list(stored)} instead of {list(expected)}"
        raise ModelRefused(f"the weights have {told}{_and_more(mismatched)}")
    if pooling and pooling.dense:
        _load_dense(checkpoint, model, pooling)
    integers = kept(model, read.integers)
    note = f"{read.came}, runs as {runs_as(model, read.layers, integers)}" if read.came else ""
    return Loaded(model.eval(), integers, read.came, note)


@contextmanager
def _without_adapters() -> Iterator[None]:
    """Where `peft` is installed, transformers puts an adapter that lies beside the weights into the model."""
    known = [(place, place.is_peft_available) for place in (auto_factory, peft)]
    for place, _ in known:
        vars(place).update(is_peft_available=lambda: False)
    try:
        yield
    finally:
        for place, asks in known:
            vars(place).update(is_peft_available=asks)


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


def _load(auto: Any, checkpoint: Checkpoint, dtype: str) -> _Read:
    model, report = auto.from_pretrained(
        checkpoint.directory,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        **_OPTIONS,
    )
    return _Read(model, report)


def _load_quantised(auto: Any, checkpoint: Checkpoint, scheme: Scheme, dtype: str, *, keeps: bool) -> _Read:
    config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False, local_files_only=True)
    for key in ("quantization_config", "compression_config"):
        config.__dict__.pop(key, None)  # transformers would ask for the package that made it
    own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or _OTHERWISE
    runs_in = own if dtype == "auto" else dtype
    if runs_in not in _DTYPES:
        raise ModelRefused(f"config.json: its dtype is {str(runs_in)[:40]!r}; name one with --dtype")
    found = unpack(checkpoint.weights, scheme, getattr(torch, runs_in), keeps=keeps)
    model, report = auto._model_mapping[type(config)].from_pretrained(
        None, config=config, state_dict=found.tensors, dtype=getattr(torch, runs_in), **_OPTIONS
    )
    for name in report["unexpected_keys"]:
        if name.endswith(".bias") and bool(found.tensors[name][...].any()):
            raise ModelRefused(f"the model has no place for {name}")
    _read_generation(model, checkpoint)
    return _Read(model, report, found.integers, found.layers, scheme.told)


def _load_gguf(checkpoint: Checkpoint, dtype: str, *, keeps: bool) -> _Read:
    assert checkpoint.gguf
    config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False, local_files_only=True)
    runs_in = getattr(torch, checkpoint.config["dtype"] if dtype == "auto" else dtype)
    stored = stored_tensors(checkpoint.gguf, runs_in)
    layers = quantised_layers(stored)
    tensors = dict[str, StoredTensor | Stored](stored)
    integers = dict[str, Integers]()
    for name, tensor in layers.items() if keeps else ():
        if (found := kept_integers(checkpoint.gguf, tensor, runs_in)) is not None:
            integers[name] = found
            tensors[f"{name}.weight"] = Stored(partial(of_integers, found, runs_in))
    model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=tensors, dtype=runs_in, **_OPTIONS
    )
    if unknown := sorted(report["unexpected_keys"]):
        raise ModelRefused(f"the model has no place for {unknown[0]}{_and_more(unknown)}")
    _read_generation(model, checkpoint)
    return _Read(model, report, integers, layers, f"{checkpoint.gguf.kind.name} file")


def _read_generation(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    if (checkpoint.directory / GENERATION_CONFIG).is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.directory, local_files_only=True)


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
        refuse_empty_sizes(checkpoint.config)
        kind = checkpoint.config.get("model_type")
        known = f"transformers knows no such model (model_type {kind!r})" if kind else "config.json has no model_type"
        if isinstance(kind, str) and kind in CONFIG_MAPPING:
            known = f"config.json is not of a {kind}"
        raise ModelRefused(f"{known}: {one_line(error)}") from error
    if not pools(checkpoint):
        refuse_by_config(config)
        refuse_empty_sizes(checkpoint.config)
        return None
    looks_back = refuse_pooling_config(config)
    refuse_empty_sizes(checkpoint.config)
    return read_pooling(checkpoint, hidden_size=config.get_text_config().hidden_size, looks_back=looks_back)
