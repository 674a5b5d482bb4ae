"""GGUF files, written with the `gguf` package from tiny checkpoints, and the models that they have to be.

The weights of a file are quantised, so the model that it stands for is the checkpoint's with what is left of them:
`write` gives that one, whose weights the package itself dequantised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests import checkpoints

Array = np.ndarray[Any, Any]

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
"""Which the package can only read: their blocks are drawn at random."""

ARCHITECTURES = {"gemma3_text": "gemma3", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
"""llama.cpp's names, where they are not transformers'."""

_OFFSET = ("gemma", "gemma2", "gemma3_text")
_INTERLEAVED = ("granite", "llama", "mixtral", "smollm3")
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")
_CONTROL, _NORMAL = 3, 1


def write(
    path: Path,
    model_type: str,
    kind: str,
    *,
    tokenizer: Path | None = None,
    metadata: dict[str, Any] | None = None,
    rows: dict[str, list[float]] | None = None,
    seed: int = 0,
    **changes: Any,
) -> PreTrainedModel:
    """`metadata` are keys besides those that the architecture needs, or in their place. Tensors whose rows are no
    multiple of a block are stored as F16, and those of one dimension as F32, as llama.cpp does; `rows` are further ones
    of these. `tokenizer`: a checkpoint that has one."""
    model = checkpoints.model(model_type, seed=seed, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases are all alike otherwise
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    config = model.config
    architecture = ARCHITECTURES.get(model_type, model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _add_settings(writer, config, architecture)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key, value)
    if tokenizer:
        add_tokenizer(writer, tokenizer)
    draws = np.random.default_rng(seed)
    for own, weight in _tensors(model, architecture):
        values = weight.numpy()
        heads = _heads(model_type, own, config)
        if heads:
            values = values[_pairs_first(len(values), heads)]
        if model_type in _OFFSET and own.endswith("norm.weight"):
            values = values + np.float32(1)
        stored, as_kind = _stored(values, kind, draws)
        writer.add_tensor(own, stored, raw_dtype=as_kind)
        back = gguf.quants.dequantize(stored, as_kind)
        if heads:
            back = back[np.argsort(_pairs_first(len(values), heads))]
        if model_type in _OFFSET and own.endswith("norm.weight"):
            back = back - np.float32(1)
        weight.copy_(torch.from_numpy(np.array(back)))
    for own, row in (rows or {}).items():
        writer.add_tensor(own, np.array(row, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_settings(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if hasattr(config, "head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture.startswith("gemma") and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "phi3" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_attention_scale(config.attention_multiplier)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    writer.add_eos_token_id(config.eos_token_id)


def _tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    """By llama.cpp's names, each a view of the model's own."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if found := _EXPERTS.fullmatch(name):
            parts = weight.chunk(2, dim=1) if found[2] == "gate_up" else [weight]
            for part, tensor in zip(found[2].split("_"), parts, strict=True):
                yield f"blk.{found[1]}.ffn_{part}_exps.weight", tensor
            continue
        base, _, leaf = name.rpartition(".")
        own = names.get_name(base) or names.get_name(base.replace(".mlp.", ".block_sparse_moe."))
        assert own, name
        yield f"{own}.{leaf}", weight


def _heads(model_type: str, own: str, config: Any) -> int:
    """Of a tensor whose rows llama.cpp stores in pairs; 0 for others."""
    if model_type not in _INTERLEAVED:
        return 0
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(own.split(".")[-2], 0)


def _pairs_first(rows: int, heads: int) -> Array:
    """The order in which llama.cpp stores them: row i of a head, and the one half a head further."""
    return np.arange(rows).reshape(heads, 2, -1).transpose(0, 2, 1).reshape(-1)


def _stored(values: Array, kind: str, draws: np.random.Generator) -> tuple[Array, gguf.GGMLQuantizationType]:
    wanted = gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[wanted]
    if values.ndim == 1:
        wanted = gguf.GGMLQuantizationType.F32
    elif values.shape[-1] % elements:
        wanted = gguf.GGMLQuantizationType.F16
    elif kind in K_QUANTS:
        return _drawn_blocks(values.shape[:-1], values.shape[-1] // elements, nbytes, kind, draws), wanted
    return gguf.quants.quantize(values, wanted), wanted


def _drawn_blocks(rows: tuple[int, ...], count: int, nbytes: int, kind: str, draws: np.random.Generator) -> Array:
    """Any bytes but for the scales of whole blocks, which make weights of about 0.1."""
    made = draws.integers(0, 256, (*rows, count, nbytes), dtype=np.uint8)
    if kind == "Q6_K":
        made[..., -2:] = np.array([5e-5], np.float16).view(np.uint8)
    else:
        made[..., :4] = np.array([2e-4, 1.5e-3], np.float16).view(np.uint8)
    return made.reshape(*rows, count * nbytes)


def add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    """A byte-level one, split as GPT-2's."""
    tree = json.loads((checkpoint / "tokenizer.json").read_text())
    tokens = sorted(tree["model"]["vocab"], key=tree["model"]["vocab"].get)
    control = {token["content"] for token in tree["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in control else _NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tree["model"]["merges"]])
    writer.add_bos_token_id(tokens.index("<|begin|>"))
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())
