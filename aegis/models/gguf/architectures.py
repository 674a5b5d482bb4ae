"""The architectures whose GGUF files can be read: what transformers calls the model, its settings and its tensors.

A file names tensors as llama.cpp does, and stores some of them in an order or with an offset of its own; `Architecture`
says which. Each key that decides what a model computes is read, and each tensor has a place: a file with others is
refused, for what is ignored would be computed wrongly and not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aegis.core.errors import ModelRefused
from aegis.models.gguf.keys import Keys

Settings = dict[str, Any]

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMED_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _nothing(_: Keys) -> Settings:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """`interleaved`: rows of queries and keys are in pairs, as the original implementation rotates them, where
    transformers has the first halves of all pairs first. `offset`: norms are stored with one added."""

    model_type: str
    class_name: str
    layer: Mapping[str, str]
    interleaved: bool = False
    offset: bool = False
    settings: Callable[[Keys], Settings] = _nothing


def _llama(keys: Keys) -> Settings:
    tensors = keys.file.tensors
    if keys.has("expert_count") and keys.count("expert_count") > 1:
        raise ModelRefused("it is a Llama of several experts (Mixtral), whose GGUF files are not read")
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _no_window(_: Keys) -> Settings:
    return {"use_sliding_window": False}


def _qwen3(keys: Keys) -> Settings:
    return _no_window(keys) | {"attention_bias": "blk.0.attn_q.bias" in keys.file.tensors}


def _gemma2(keys: Keys) -> Settings:
    layers, head_dim = keys.count("block_count"), head_size(keys)
    largest = layers == 46  # the one of 27 billion parameters scales by another size, which files do not tell
    return {
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _per_head(keys) if largest else head_dim,
    }


def _gemma3(keys: Keys) -> Settings:
    layers = keys.count("block_count")
    whole = rope(keys)
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
    return {
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _per_head(keys) if layers == 62 else head_size(keys),  # as above
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
    }


def _per_head(keys: Keys) -> int:
    return keys.count("embedding_length") // keys.count("attention.head_count")


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LAYER, interleaved=True, settings=_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER, settings=_no_window),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER | _NORMED_HEADS, settings=_qwen3),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _LAYER, offset=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _LAYER | _FOUR_NORMS, offset=True, settings=_gemma2),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _LAYER | _FOUR_NORMS | _NORMED_HEADS, offset=True, settings=_gemma3
    ),
}
"""By the name that files have for it."""


def architecture_of(keys: Keys) -> Architecture:
    """Raises ModelRefused."""
    found = ARCHITECTURES.get(keys.architecture)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelRefused(f"GGUF files of architecture {keys.architecture[:40]!r} are not read; those of {known} are")
    return found


def config_of(keys: Keys) -> Settings:
    """The `config.json` that a checkpoint of the same model has. Raises ModelRefused."""
    architecture, file = architecture_of(keys), keys.file
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelRefused("it has no token_embd.weight, so it is no language model")
    heads = keys.count("attention.head_count")
    ends = [keys.token(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_size(keys),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rope(keys),
        "bos_token_id": keys.token("bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)) or None,
        "pad_token_id": keys.token("padding_token_id"),
    }
    _refuse_impossible(config, keys)
    return config | architecture.settings(keys)


def _refuse_impossible(config: Settings, keys: Keys) -> None:
    """Raises ModelRefused for sizes that no tensor has, before memory is taken for them."""
    largest = max(max(place.shape) for place in keys.file.tensors.values())
    sizes = {
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"] * config["head_dim"],
        "attention.head_count_kv": config["num_key_value_heads"] * config["head_dim"],
    }
    for key, size in sizes.items():
        if size > largest:
            raise ModelRefused(f"{keys.named(key)} asks for {size} rows, and no tensor has more than {largest}")


def head_size(keys: Keys) -> int:
    """Raises ModelRefused where keys and values differ, or only a part of a head is rotated."""
    heads = keys.count("attention.head_count")
    size = keys.count("attention.key_length", max(1, keys.count("embedding_length") // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := keys.count(key, size)) != size:
            raise ModelRefused(f"{keys.named(key)} is {other}, where a head has {size}; it should be the same")
    return size


def rope(keys: Keys) -> Settings:
    """Raises ModelRefused for a scaling that is not known."""
    theta = keys.number("rope.freq_base", 10_000.0)
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 0.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        original = keys.count("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise ModelRefused(f"{keys.named('rope.scaling.type')} is {kind[:40]!r}; linear and yarn can be computed")
