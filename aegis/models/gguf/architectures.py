"""The architectures whose GGUF files can be read: what transformers calls the model, its settings and its tensors.

A file names tensors as llama.cpp does, and stores some of them in an order or with an offset of its own; `Architecture`
says which. Each key that decides what a model computes is read, and each tensor has a place: a file with others is
refused, for what is ignored would be computed wrongly and not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aegis.core.errors import ModelRefused
from aegis.models.gguf.keys import Keys
from aegis.models.gguf.rope_factors import FACTORS, LONG_FACTORS, SHORT_FACTORS, factors_in, rope_of_factors

Settings = dict[str, Any]

_HARMLESS = frozenset(
    {
        "expert_count",
        "expert_used_count",
        "rope.dimension_count",
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "vocab_size",
    }
)
"""Keys that say what other keys or tensors say too, or nothing that is computed."""

_WINDOW = "attention.sliding_window"

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
    transformers has the first halves of all pairs first. `offset`: norms are stored with one added. `experts` have no
    modules of their own: those of a layer are one tensor, and two of a name one after the other."""

    model_type: str
    class_name: str
    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    offset: bool = False
    rotates_part: bool = False
    settings: Callable[[Keys], Settings] = _nothing


def _llama(keys: Keys) -> Settings:
    tensors = keys.file.tensors
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _mixtral(keys: Keys) -> Settings:
    return {"num_local_experts": keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def _granite(keys: Keys) -> Settings:
    return _llama(keys) | {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", head_size(keys) ** -0.5),
    }


def _no_window(_: Keys) -> Settings:
    return {"use_sliding_window": False}


def _qwen3(keys: Keys) -> Settings:
    return _no_window(keys) | {"attention_bias": "blk.0.attn_q.bias" in keys.file.tensors}


def _gemma2(keys: Keys) -> Settings:
    layers, head_dim = keys.count("block_count"), head_size(keys)
    largest = layers == 46  # the one of 27 billion parameters scales by another size, which files do not tell
    return {
        "sliding_window": keys.count(_WINDOW, 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _per_head(keys) if largest else head_dim,
    }


def _gemma3(keys: Keys) -> Settings:
    layers = keys.count("block_count")
    whole = rope(keys)
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)}
    return {
        "sliding_window": keys.count(_WINDOW),
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _per_head(keys) if layers == 62 else head_size(keys),  # as above
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
    }


def _qwen3_moe(keys: Keys) -> Settings:
    return _qwen3(keys) | {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # which llama.cpp does, and files do not tell
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


def _phi3(keys: Keys) -> Settings:
    head_dim = head_size(keys, rotates_part=True)
    part = keys.count("rope.dimension_count", head_dim)
    found: Settings = {"rope_parameters": _longrope(keys) | {"partial_rotary_factor": part / head_dim}}
    if "original_max_position_embeddings" in found["rope_parameters"]:
        found["original_max_position_embeddings"] = found["rope_parameters"]["original_max_position_embeddings"]
    return found | {"sliding_window": keys.count(_WINDOW) if keys.has(_WINDOW) else None}


def _per_head(keys: Keys) -> int:
    return keys.count("embedding_length") // keys.count("attention.head_count")


_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED = {name: own for name, own in _LAYER.items() if name not in ("ffn_gate", "ffn_up", "ffn_down")}
_ROUTED = _SHARED | {"ffn_gate_inp": "mlp.gate"}
_NORMED_AFTER = {name: own for name, own in _LAYER.items() if name not in ("attn_norm", "ffn_norm")} | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _ROUTED, _EXPERTS, interleaved=True, settings=_mixtral)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LAYER, interleaved=True, settings=_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER, settings=_no_window),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER | _NORMED_HEADS, settings=_qwen3),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _LAYER, offset=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _LAYER | _FOUR_NORMS, offset=True, settings=_gemma2),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _LAYER | _FOUR_NORMS | _NORMED_HEADS, offset=True, settings=_gemma3
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", _LAYER, interleaved=True, settings=_granite),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _NORMED_AFTER | _NORMED_HEADS),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _FUSED, rotates_part=True, settings=_phi3),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _ROUTED | _NORMED_HEADS, _EXPERTS, settings=_qwen3_moe
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _LAYER, interleaved=True, settings=_llama),
}
"""By the name that files have for it."""


def architecture_of(keys: Keys) -> Architecture:
    """Raises ModelRefused."""
    found = ARCHITECTURES.get(keys.architecture)
    if found is ARCHITECTURES["llama"] and keys.has("expert_count"):
        return _MIXTRAL
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
        "intermediate_size": keys.count("feed_forward_length", keys.expert_size()),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_size(keys, rotates_part=architecture.rotates_part),
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rope(keys),
        "bos_token_id": keys.token("bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)) or None,
        "pad_token_id": keys.token("padding_token_id"),
    }
    _refuse_impossible(config, keys)
    config |= architecture.settings(keys)
    if unread := [key for key in keys.unread() if key.removeprefix(keys.named("")) not in _HARMLESS]:
        raise ModelRefused(f"it has a key {unread[0]!r}, which is not known in a {architecture.model_type}")
    return config


def _refuse_impossible(config: Settings, keys: Keys) -> None:
    """Raises ModelRefused for sizes that no tensor has, and for more layers than tensors, before memory is taken for
    them."""
    layers, tensors = config["num_hidden_layers"], len(keys.file.tensors)
    if layers > tensors:
        raise ModelRefused(f"{keys.named('block_count')} is {layers}, and there are {tensors} tensors in all")
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


def head_size(keys: Keys, *, rotates_part: bool = False) -> int:
    """Raises ModelRefused where keys and values differ, or only a part of a head is rotated that `rotates` whole."""
    heads = keys.count("attention.head_count")
    size = keys.count("attention.key_length", max(1, keys.count("embedding_length") // heads))
    for key in ("attention.value_length", *(() if rotates_part else ("rope.dimension_count",))):
        if (other := keys.count(key, size)) != size:
            raise ModelRefused(f"{keys.named(key)} is {other}, where a head has {size}; it should be the same")
    return size


def _longrope(keys: Keys) -> Settings:
    """Raises ModelRefused."""
    tensors = keys.file.tensors
    if SHORT_FACTORS not in tensors or LONG_FACTORS not in tensors:
        return rope(keys)
    found: Settings = {
        "rope_type": "longrope",
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "short_factor": factors_in(keys.file, SHORT_FACTORS),
        "long_factor": factors_in(keys.file, LONG_FACTORS),
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }
    if keys.has("rope.scaling.attn_factor"):
        found["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return found


def rope(keys: Keys) -> Settings:
    """Raises ModelRefused for a scaling that is not known."""
    theta = keys.number("rope.freq_base", 10_000.0)
    if FACTORS in keys.file.tensors:
        factors = factors_in(keys.file, FACTORS)
        if 2 * len(factors) != head_size(keys):
            raise ModelRefused(
                f"{FACTORS} has {len(factors)} factors, where a head has {head_size(keys)}: twice as many"
            )
        return rope_of_factors(factors, theta, keys.count("context_length"))
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 0.0)
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise ModelRefused(f"{keys.named('rope.scaling.type')} is {kind[:40]!r}; linear and yarn can be computed")
