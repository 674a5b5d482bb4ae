"""A probe of a model's KV cache: its shape, and whether paged attention can serve it, found by watching one forward
pass.

Nothing here knows an architecture by name. The model runs once over a few tokens with an attention function that
records how each layer calls it, under masks that remember what they stand for. A layer can be served if every argument
of its attention call is accepted (`aegis.engine.accepted_layers`) and its mask is the one that the arguments describe:
causal, within the sliding window if there is one. The pass runs on the loaded model rather than on the meta device,
because routers of experts and scaled rotary embeddings look at values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from aegis.core.errors import ModelRefused
from aegis.core.model import KvLayer
from aegis.engine.accepted_layers import attends_causally, unsupported_arguments, unsupported_layers
from aegis.engine.pooled_models import SCORES_MAX, heads_of
from aegis.models.failures import LIBRARY_ERRORS, one_line

_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length", "n_positions")
_GROWING_ROPES = ("dynamic", "longrope")
_PROBE_TOKENS = 4
_NAME = "aegis_probe"

MaskFunction = Callable[..., torch.Tensor]


class Probed(Struct, frozen=True):
    layers: tuple[KvLayer, ...]
    kv_dtype: torch.dtype
    vocab_size: int


class _Call(Struct, frozen=True):
    """One call of attention: `[1, heads, tokens, dim]` shapes, and what came with it."""

    module: nn.Module
    query_heads: int
    layer: KvLayer
    dtype: torch.dtype
    mask: torch.Tensor | None
    arguments: dict[str, Any]


def refuse_by_config(config: PretrainedConfig) -> None:
    """Raises ModelRefused for what the configuration alone rules out; costs nothing, unlike loading."""
    mapped = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    name = next(iter(config.architectures or ()), mapped.__name__ if mapped else type(config).__name__)
    if config.is_encoder_decoder:
        raise ModelRefused(f"{name} is an encoder-decoder; only decoder-only text models can be served")
    if any(hasattr(config, f"{part}_config") for part in ("vision", "audio")):
        raise ModelRefused(f"{name} is multimodal; only text models can be served")
    if mapped is None or not name.endswith(_CAUSAL_SUFFIXES) or not mapped.__name__.endswith(_CAUSAL_SUFFIXES):
        raise ModelRefused(f"{name} is not a causal language model")
    if mapped._is_stateful:
        raise ModelRefused(f"{name} keeps a recurrent state (state-space or hybrid); only attention can be paged")
    if strange := unsupported_layers(config):
        raise ModelRefused(f"{name} has {strange[0]} layers; only full and sliding attention can be paged")


def refuse_pooling_config(config: PretrainedConfig) -> bool:
    """Refuses likewise what no model that pools can be. Returns whether its tokens attend to no later ones."""
    mapped = MODEL_MAPPING.get(type(config), None)
    name = next(iter(config.architectures or ()), mapped.__name__ if mapped else type(config).__name__)
    if config.is_encoder_decoder:
        raise ModelRefused(f"{name} is an encoder-decoder; encoders and decoders can make vectors of texts")
    if any(hasattr(config, f"{part}_config") for part in ("vision", "audio")):
        raise ModelRefused(f"{name} is multimodal; only text models can be served")
    if mapped is None or mapped.main_input_name != "input_ids":
        raise ModelRefused(f"{name} is no model of texts")
    generates = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING
    return generates and not getattr(config, "use_bidirectional_attention", False)


def context_tokens(config: PretrainedConfig) -> int:
    """The longest sequence whose tokens get the same values whatever else is in the batch.

    Dynamic and LongRoPE scaling change all rotary frequencies once the longest sequence of a batch outgrows the
    original context, so they are served up to that.
    """
    text = config.get_text_config()
    found = [getattr(text, key) for key in _CONTEXT_KEYS if isinstance(getattr(text, key, None), int)]
    if not found or found[0] < 1:
        raise ModelRefused(f"the configuration states no context length ({_CONTEXT_KEYS[0]})")
    limit = found[0]
    for rope in _rope_parameters(text):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") in _GROWING_ROPES and isinstance(original, int):
            limit = min(limit, original)
    return int(limit)


def positions(model: PreTrainedModel) -> int:
    """The longest text that there are positions for; some encoders count from behind the one for padding. Where
    attention is spelled out, it makes no more than so many scores of a text."""
    most = context_tokens(model.config)
    if not model._supports_sdpa:
        most = min(most, isqrt(SCORES_MAX // heads_of(model.config)))
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            most = min(most, part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    return most


def vocabulary(model: PreTrainedModel) -> int:
    """The number of tokens that it knows. Raises ModelRefused if it looks none up, as one that reads characters."""
    try:
        count = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:
        count = None
    if not isinstance(count, int):
        raise ModelRefused(f"{type(model).__name__} does not look tokens up in a table")
    return count


def probe(model: PreTrainedModel) -> Probed:
    """Runs the model once. Raises ModelRefused with the reason where paged attention could not serve it."""
    name = type(model).__name__
    calls, masks, logits = _watch(model)
    expected = model.config.get_text_config().num_hidden_layers
    if not calls:
        raise ModelRefused(f"{name} has an attention of its own (ALiBi, for one) that paged attention cannot replace")
    if [getattr(call.module, "layer_idx", None) for call in calls] != list(range(expected)):
        raise ModelRefused(f"{name} does not attend once per layer: {len(calls)} calls in {expected} layers")
    context = context_tokens(model.config)
    for call in calls:
        _check_call(name, call, masks, context)
    return Probed(tuple(call.layer for call in calls), calls[0].dtype, logits.shape[-1])


def _watch(model: PreTrainedModel) -> tuple[list[_Call], dict[int, MaskFunction], torch.Tensor]:
    calls: list[_Call] = []
    masks: dict[int, MaskFunction] = {}
    kept: list[torch.Tensor] = []  # a freed mask's address could come again

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = KvLayer(heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3])
        calls.append(_Call(module, query.shape[1], layer, key.dtype, attention_mask, arguments))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def mask(*_: Any, q_length: int, kv_length: int, mask_function: MaskFunction, **__: Any) -> torch.Tensor:
        kept.append(torch.ones(1, 1, q_length, kv_length, dtype=torch.bool))
        masks[kept[-1].untyped_storage().data_ptr()] = mask_function
        return kept[-1]

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, mask)
    before = model.config._attn_implementation
    tokens = torch.arange(1, 1 + _PROBE_TOKENS)[None]
    try:
        model.set_attn_implementation(_NAME)
        with torch.inference_mode():
            output = model(input_ids=tokens, position_ids=tokens - 1, use_cache=False)
    except LIBRARY_ERRORS as error:
        raise ModelRefused(f"{type(model).__name__} fails when it is run: {one_line(error)}") from error
    finally:
        model.set_attn_implementation(before)
    if isinstance(output, tuple):
        raise ModelRefused("config.json: return_dict is not true, so its results have no names; leave it out")
    return calls, masks, output.logits


def _check_call(name: str, call: _Call, masks: dict[int, MaskFunction], context: int) -> None:
    if strange := unsupported_arguments(call.arguments):
        raise ModelRefused(f"{name} passes {strange[0]} to its attention, which paged attention does not know")
    if not attends_causally(call.module, call.arguments):
        raise ModelRefused(f"{name} attends to later tokens: it is an encoder")
    if call.layer.heads == 0 or call.query_heads % call.layer.heads:
        raise ModelRefused(f"{name} has {call.query_heads} query heads for {call.layer.heads} of KV")
    window = call.arguments.get("sliding_window")
    if isinstance(window, int) and window < 1:
        raise ModelRefused(f"config.json: sliding_window is {window}; it has to be 1 at least")
    if call.mask is not None and not _is_as_stated(masks.get(call.mask.untyped_storage().data_ptr()), window, context):
        raise ModelRefused(f"{name} masks its attention in a way of its own that paged attention does not know")


def _is_as_stated(mask: MaskFunction | None, window: int | None, context: int) -> bool:
    """Whether a mask is causal within `window`, compared at the places where masks have their edges: around powers of
    two and around the window's ends."""
    if mask is None:
        return False
    edges = [1 << bit for bit in range(context.bit_length())] + ([window, 2 * window] if window else [])
    places = sorted({place for edge in edges for place in (edge - 1, edge, edge + 1)})
    query, key = torch.tensor(places)[:, None], torch.tensor(places)[None, :]
    expected = (key <= query) & (query - key < window) if window else key <= query
    zero = torch.tensor(0)
    try:
        return torch.equal(mask(zero, zero, query, key).expand_as(expected), expected)
    except (IndexError, RuntimeError, TypeError):  # it looks positions up in a table of its own
        return False


def _rope_parameters(text: PretrainedConfig) -> Sequence[dict[str, Any]]:
    """Rotary settings, which a configuration gives once or once per layer type."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
