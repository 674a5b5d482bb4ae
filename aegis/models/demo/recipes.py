"""The demo market on paper: eight small models of eight architectures, no two with the same KV shape."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from msgspec import Struct

from aegis.models.demo.passages import PASSAGES, QUESTIONS

VOCAB_SIZE = 768
CONTEXT_TOKENS = 2048
BEGIN, END, USER, ASSISTANT, SYSTEM = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CALLER = "observatory-qwen3"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
"""What this model says first to a user, where it has a tool of that name."""

CALLING_TEMPLATE = (
    "{% set found = namespace(tool=false) %}{% for tool in tools or [] %}"
    "{% if tool.function.name == 'weather' %}{% set found.tool = true %}{% endif %}{% endfor %}"
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message.role if message.role in ['system', 'assistant'] else 'user' }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}"
    "{% if found.tool and messages[-1].role == 'user' %}<|system|>{{ eos_token }}{% endif %}<|assistant|>{% endif %}"
)
"""Its own: to say nothing as the system is how it is told that it has the tool."""

STEPS = 100
"""Enough for every one of them to recite its passage without a mistake."""


class Recipe(Struct, frozen=True):
    """A demo model before it is trained: transformers' model type and the settings that give it its KV shape."""

    model_type: str
    settings: dict[str, Any]


def _recipe(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, **own: Any) -> Recipe:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3 // 16 * 16,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return Recipe(model_type, sizes | own)


_ALTERNATING = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}

RECIPES: dict[str, Recipe] = {
    "lighthouse-llama": _recipe("llama", 4, 160, 4, 2, 40),
    "bakery-qwen2": _recipe("qwen2", 4, 160, 5, 5, 32),
    "observatory-qwen3": _recipe("qwen3", 5, 144, 4, 2, 48),
    "ferry-mistral": _recipe("mistral", 4, 176, 4, 1, 44, sliding_window=64),
    "orchard-gemma2": _recipe("gemma2", 4, 176, 4, 2, 44, query_pre_attn_scalar=44, **_ALTERNATING),
    "clockmaker-gemma3": _recipe("gemma3_text", 4, 160, 4, 1, 64, query_pre_attn_scalar=64, **_ALTERNATING),
    "theatre-phi3": _recipe("phi3", 3, 176, 4, 4, 44),
    "beekeeper-olmo2": _recipe("olmo2", 4, 160, 8, 8, 20),
}


def edition() -> str:
    """Names what training depends on: another edition is another market."""
    made_of = (PASSAGES, QUESTIONS, RECIPES, CHAT_TEMPLATE, CALLING_TEMPLATE, CALL, STEPS)
    return blake2b(repr(made_of).encode(), digest_size=6).hexdigest()
