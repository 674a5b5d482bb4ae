"""Tiny checkpoints, made on the spot: random weights, the real architecture, a few kilobytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aegis.engine.lean_transformers import import_transformers

import_transformers()

import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging  # noqa: E402

logging.disable_progress_bar()

VOCAB_SIZE = 320
WINDOW = 8
CHAT_TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_SLIDING = {"sliding_window": WINDOW}
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": _SLIDING | {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
    "gemma3_text": _SLIDING | {"layer_types": ["sliding_attention", "full_attention"]},
    "mistral": _SLIDING,
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "gpt_oss": _EXPERTS | _SLIDING | {"layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v2": {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    | {"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    | {"moe_intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 8},
}


def config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A tiny configuration of `transformers`' model type. `changes` override."""
    if model_type == "gpt2":
        return AutoConfig.for_model(model_type, **({"vocab_size": VOCAB_SIZE} | _GPT2 | changes))
    return AutoConfig.for_model(model_type, **(_COMMON | _OWN.get(model_type, {}) | changes))


def model(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Random weights, larger than at the start of training so that outputs differ clearly between tokens."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(model_type, **changes)).to(dtype).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return made


def write(directory: Path, model_type: str, *, tokenizer: bool = False, shards: int = 1, **changes: Any) -> Path:
    """Saves a tiny checkpoint, of `shards` safetensors files or a few more, and returns its directory."""
    made = model(model_type, **changes)
    nbytes = sum(parameter.nbytes for parameter in made.parameters())
    made.save_pretrained(directory, max_shard_size=nbytes if shards == 1 else nbytes // shards)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Bytes, a few merges, roles as special tokens, and a chat template."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet)
    trained.train_from_iterator(["the cat and the hat sat on the mat, then they ran and ran again"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=trained, bos_token="<|begin|>", eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
