"""The modules of models: built without weights, where that can be before the processes that run them are forked, since
building takes most of the time in which a new instance gets ready; and bound to their weight ranges, for life."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from aegis.core.errors import ModelRefused
from aegis.core.model import Manifest, ModelSpec
from aegis.engine.accepted_layers import unsupported_layers
from aegis.engine.gated_mlps import use_own_memory
from aegis.engine.packed_linear import packed_at, product
from aegis.engine.paged_attention import NAME
from aegis.engine.quantised.layers import replace_layers
from aegis.engine.tensor_views import check_bound, dtype_named, tensor_at
from aegis.process.error_lines import flattened

ONEDNN_ELEMENTS_MIN = 1 << 19
"""Of a weight in float32."""

COMPUTED_ELEMENTS_MAX = 1 << 22
"""Larger tensors of zeros or ones are weights, such as those of many experts."""

_FILLED = (torch.zeros, torch.ones)
_INITIALISING = ("torch.nn.init", "transformers.initialization")
"""The second one stands in for the first while transformers builds a model."""

_AHEAD_MAX = 512

_ahead: dict[tuple[str, str], PreTrainedModel] = {}  # by directory and fingerprint, the oldest first


def build_ahead(encoded: bytes) -> None:
    """Builds the modules of a `ModelSpec` in MessagePack, for processes that are forked from this one. Starts no
    thread: a process with several cannot be forked. Raises ModelRefused."""
    spec = msgspec.msgpack.decode(encoded, type=ModelSpec)
    torch.set_num_threads(1)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the instances that are up say it in the server's log
    try:
        _ahead[spec.directory, spec.manifest.fingerprint] = built_for(spec)
    finally:
        logging.set_verbosity(verbosity)
    while len(_ahead) > _AHEAD_MAX:
        del _ahead[next(iter(_ahead))]


def built_ahead(spec: ModelSpec) -> PreTrainedModel | None:
    """The model's modules, once; None if they were not built before."""
    return _ahead.pop((spec.directory, spec.manifest.fingerprint), None)


def built_for(spec: ModelSpec) -> PreTrainedModel:
    """The model's modules, without weights; those that were built before this process was forked, if they were. Raises
    ModelRefused."""
    if ahead := built_ahead(spec):
        return ahead
    module = built(spec, AutoModelForCausalLM, attention=NAME)
    if strange := unsupported_layers(module.config):
        raise ModelRefused(f"{spec.root}: {strange[0]} layers cannot be served")
    if not module._can_set_attn_implementation():
        raise ModelRefused(f"{spec.root}: {type(module).__name__} does not take an attention implementation")
    return module


def built(spec: ModelSpec, auto_class: Any, *, attention: str) -> PreTrainedModel:
    """The architecture without weights. It is built in float32, because transformers sets torch's default dtype
    meanwhile and other threads would notice; the weights bring their own. Raises ModelRefused."""
    try:
        config = AutoConfig.from_pretrained(spec.directory, local_files_only=True, trust_remote_code=False)
        try:
            with _WithoutWeights():
                module = _of_config(config, auto_class, attention)
        except RuntimeError:  # it computes with a weight
            with torch.device("meta"):
                module = _of_config(config, auto_class, attention)
    except (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelRefused(f"{spec.root}: transformers cannot build it: {flattened(error)}") from error
    replace_layers(module, spec.manifest.tensors)
    _forget_values(module)
    module.config.dtype = dtype_named(spec.manifest.dtype)
    return module.eval()


def bound(module: PreTrainedModel, spec: ModelSpec, base: int, device: torch.device) -> None:
    """Binds the whole model to its weight range. Raises ModelRefused if its image lacks something."""
    _bind(module, spec.manifest, base, device)
    check_bound(module, spec.model)
    use_onednn(module)
    use_own_memory(module)


def _bind(module: PreTrainedModel, manifest: Manifest, base: int, device: torch.device) -> None:
    """Puts a view of the weight range wherever a tensor of the image belongs."""
    for entry in manifest.tensors:
        if entry.packing:
            view = packed_at(base + entry.offset, entry.shape, entry.dtype, entry.packing)
        else:
            view = tensor_at(base + entry.offset, entry.shape, dtype_named(entry.dtype), device)
        bound = view if entry.buffer else torch.nn.Parameter(view, requires_grad=False)
        for name in entry.names:
            owner, _, leaf = name.rpartition(".")
            place = module.get_submodule(owner)
            (place._buffers if entry.buffer else place._parameters)[leaf] = bound


def _of_config(
    config: PretrainedConfig, auto_class: Any = AutoModelForCausalLM, attention: str = NAME
) -> PreTrainedModel:
    module: PreTrainedModel = auto_class.from_config(
        config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
    )
    return module


class _WithoutWeights(TorchFunctionMode):
    """Puts weights, which are allocated empty or are large, on the meta device and leaves them uninitialised. Computes
    everything else, such as rotary frequencies, on the CPU: torch computes on the meta device in Python, and imports
    its compiler for that."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) in _INITIALISING:
            return args[0] if args else named["tensor"]
        if func is torch.empty or (func in _FILLED and _elements(args, named) > COMPUTED_ELEMENTS_MAX):
            named = {"device": "meta"} | named
        return func(*args, **named)


def _elements(args: tuple[Any, ...], named: dict[str, Any]) -> int:
    size = args or named.get("size", ())
    return prod(size[0] if size and isinstance(size[0], Sequence) else size)


def _forget_values(module: torch.nn.Module) -> None:
    """Moves all tensors of the module to the meta device. One tensor in two places stays one tensor."""
    known: dict[int, torch.Tensor] = {}
    for part in module.modules():
        places: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, vars(part))
        for held in places:
            for name, value in held.items():
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    if id(value) not in known:
                        bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                        is_weight = isinstance(value, torch.nn.Parameter)
                        known[id(value)] = torch.nn.Parameter(bare, value.requires_grad) if is_weight else bare
                    held[name] = known[id(value)]


def use_onednn(module: torch.nn.Module) -> None:
    """Replaces the `forward` of every plain linear layer whose weight is packed, or is in float32 and large. Weights
    must be bound before and stay bound.

    torch hands products in float32 on the CPU to MKL, whose kernels for a few rows are 1.3 to 2.3 times slower than
    oneDNN's on processors that are not Intel's. oneDNN's operator costs ten to forty microseconds more per call, and
    half a MiB for each number of rows: small layers stay as they are. Other dtypes reach oneDNN by themselves, but it
    puts a weight that is not packed in order anew for each product."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # torch was built without oneDNN
        return
    for layer in module.modules():
        if type(layer) is torch.nn.Linear and layer.weight.device.type == "cpu":
            large = layer.weight.dtype == torch.float32 and layer.weight.numel() >= ONEDNN_ELEMENTS_MIN
            if layer.weight.is_mkldnn or large:
                layer.forward = partial(product, weight=layer.weight, bias=layer.bias)  # type: ignore[method-assign]
