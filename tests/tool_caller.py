"""A model that calls tools: what it says is written down, and its chat template picks what fits.

It has no attention and no layers to speak of: each token leads to the next one of its script, whatever was before, at
any temperature that clients use. Where a grammar forbids that token, the shortest text that it allows comes.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from aegis.engine.lean_transformers import import_transformers

import_transformers()

import torch  # noqa: E402
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

BEGIN, END = "<|begin|>", "<|end|>"
CALLS: dict[str, dict[str, Any]] = {
    "weather": {"city": "Paris"},
    "exec_command": {"cmd": "echo written > exec_command.txt"},
    "shell_command": {"command": "echo written > shell_command.txt"},
    "Bash": {"command": "echo written > Bash.txt", "description": "Writes a file"},
}
"""The tools that it knows, and what it calls each with."""

GREETING = ("The lamp", " is lit", " and the", " sea is", " calm.")
AFTERWARDS = ("It is", " done:", " all went", " well.")
WITHOUT_SCRIPT = "plain"
_SHORTEST = (END, '"', "}", "]")
_HIDDEN = 128
_SCALE = 40.0

_TEMPLATE = """\
{%- set known = CALLS -%}
{%- set found = namespace(name='') -%}
{%- for tool in tools or [] -%}
{%- if not found.name and tool.function.name in known -%}{%- set found.name = tool.function.name -%}{%- endif -%}
{%- endfor -%}
{#- Calls are told as <tool_call>, in the form of Hermes. -#}
{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if messages[-1].role == 'tool' -%}<|script:done|>
{%- elif found.name -%}<|script:{{ found.name }}|>
{%- else -%}<|script:hello|>{%- endif -%}
{%- endif -%}
"""


def write(directory: Path, *, context_tokens: int = 1 << 15) -> Path:
    """Saves the checkpoint and returns its directory."""
    tokenizer, following = _tokenizer()
    end = tokenizer.convert_tokens_to_ids(END)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=context_tokens,
        bos_token_id=0,
        eos_token_id=end,
        pad_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    shortest = [tokenizer.convert_tokens_to_ids(text) for text in _SHORTEST]
    with torch.no_grad():
        _write_down(model, following, shortest)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _write_down(model: Any, following: dict[int, int], shortest: list[int]) -> None:
    """The last layer looks up, by what a token's embedding is, the one that follows it. The first number of every
    embedding is the same; by it tokens that end things are likelier than all others that a script does not name."""
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_()
    embeddings[:, 0] = 1
    head = model.lm_head.weight
    head.normal_(std=1e-3)
    for rank, token in enumerate(shortest):
        head[token, 0] = (len(shortest) - rank) * _SCALE
    for token, following_one in following.items():
        head[following_one] += 10 * _SCALE / _HIDDEN * embeddings[token]


def _pieces(name: str, arguments: dict[str, Any]) -> list[str]:
    """Each is one token, which no other script has. Joined they are the call, as OpenAI's strict tools have it too."""
    values = [f'{", " if at else "{"}"{key}": {json.dumps(value)}' for at, (key, value) in enumerate(arguments.items())]
    return [f'<tool_call>\n{{"name": "{name}"', f', "arguments": {values[0]}', *values[1:], "}}\n</tool_call>"]


def _scripts() -> dict[str, list[str]]:
    calls = {name: _pieces(name, arguments) for name, arguments in CALLS.items()}
    return {"hello": list(GREETING), "done": list(AFTERWARDS)} | calls


def _tokenizer() -> tuple[PreTrainedTokenizerFast, dict[int, int]]:
    """And which token follows which."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: at for at, text in enumerate([BEGIN, END, *alphabet])}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=BEGIN, eos_token=END, pad_token=END)
    scripts = _scripts()
    fast.add_special_tokens({"additional_special_tokens": [f"<|script:{name}|>" for name in scripts]})
    fast.chat_template = _TEMPLATE.replace("CALLS", json.dumps(list(CALLS)))
    following = dict[int, int]()
    for name, texts in scripts.items():
        ids = [fast.convert_tokens_to_ids(f"<|script:{name}|>")]
        for text in texts:
            _add(fast, text)
            ids.append(fast.convert_tokens_to_ids(text))
        for token, next_one in pairwise([*ids, fast.convert_tokens_to_ids(END)]):
            assert following.setdefault(token, next_one) == next_one, f"two scripts have {token}"
    return fast, following


def _add(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False)])
