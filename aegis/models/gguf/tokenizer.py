"""The tokenizer and chat template of a GGUF file, written as the files that checkpoints have of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aegis.core.errors import ModelRefused
from aegis.models.failures import LIBRARY_ERRORS, disk_full, one_line
from aegis.models.gguf.header import GgufFile
from aegis.models.gguf.keys import Keys

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_GPT2 = frozenset({"gpt-2", "gpt2"})
"""Names of ways to split a text before its merges: GPT-2's."""

_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""GPT-2's, with each digit on its own."""

_UNNAMED = {"qwen2": "qwen2", "qwen3": "qwen2"}
"""Old files do not name theirs; by architecture."""

_BEGINS = frozenset({"llama3", "llama-v3", "llama-bpe"})
"""Those that begin a text with a token of its own, where a file does not say."""

_WHOLE = _BEGINS | {"falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
"""Those that take a word that is a token as it is, whatever its merges make."""


def write_tokenizer_files(file: GgufFile, into: Path) -> str | None:
    """Returns why there are none, None if there are. Without them a model is served by token ids."""
    try:
        from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return "this release of transformers makes no tokenizers of GGUF files; install a newer one"
    try:
        keys = Keys.of(file)
        tokens = file.texts("tokenizer.ggml.tokens")
        if not tokens:
            return "the file has no tokenizer"
        given = _given(file, tokens, GGUF_TOKENIZER_MAPPING["tokenizer"])
        if given.get("tokenizer_type") == "gpt2":
            split = given.setdefault("pre_tokenizer_type", _UNNAMED.get(keys.architecture, "gpt-2"))
            if split not in GGUF_PRE_TOKENIZER_SPLITS and split not in _GPT2 | _DIGITS:
                return f"its tokenizer splits texts as {split!r} does, which is not known"
        made, _ = convert_gguf_tokenizer(keys.architecture, given)
        _adjust(made, given)
        whole = given.get("pre_tokenizer_type") in _WHOLE
        _save(_within(made, len(tokens), whole=whole), given, keys, tokens, into)
        return None
    except (*LIBRARY_ERRORS, ModelRefused) as error:
        if disk_full(error):
            raise
        return f"its tokenizer cannot be read: {one_line(error)}"


def _given(file: GgufFile, tokens: list[str], names: Mapping[str, str]) -> dict[str, Any]:
    """What transformers' converter takes. Raises ModelRefused for lists that do not fit together."""
    given: dict[str, Any] = {
        name: value
        for key, name in names.items()
        if isinstance(value := file.metadata.get(f"tokenizer.{key}"), str | int | float | bool)
    }
    given["tokens"] = tokens
    for name in ("scores", "token_type"):
        numbers = file.numbers(f"tokenizer.ggml.{name}")
        if numbers is not None and len(numbers) != len(tokens):
            raise ModelRefused(f"there are {len(tokens)} tokens and {len(numbers)} of {name}")
        if numbers is not None:
            given[name] = numbers
    known = set(tokens)
    if len(known) < len(tokens):
        raise ModelRefused("a token is there twice")
    merges = file.texts("tokenizer.ggml.merges")
    if merges is not None:
        for merge in merges:
            left, _, right = merge.partition(" ")
            if not {left, right, left + right} <= known:
                raise ModelRefused(f"the merge {merge[:40]!r} is not one of two tokens to a third")
        given["merges"] = merges
    return given


def _adjust(made: Tokenizer, given: Mapping[str, Any]) -> None:
    """Adjusts the tokenizer to what files say and the converter does not read."""
    if given.get("pre_tokenizer_type") in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if isinstance(made.pre_tokenizer, pre_tokenizers.Metaspace):
        _as_sentencepiece(made, prefix=given.get("add_prefix_space") is not False)


def _as_sentencepiece(made: Tokenizer, *, prefix: bool) -> None:
    """A `prefix` is put before any text, also one that begins with a space, as SentencePiece and llama.cpp have it; the
    converter's class puts none before a space."""
    spaces = [normalizers.Replace(" ", "▁")]
    decoded = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    made.decoder = decoders.Sequence([*decoded, decoders.Strip(" ", 1, 0)] if prefix else decoded)


def _within(made: Tokenizer, count: int, *, whole: bool) -> Tokenizer:
    """Without the tokens that the converter's classes add of their own: the model has no rows for them."""
    tree = json.loads(made.to_str())
    if whole:
        tree["model"]["ignore_merges"] = True
    tree["added_tokens"] = [token for token in tree["added_tokens"] if token["id"] < count]
    return Tokenizer.from_str(json.dumps(tree))


def _save(made: Tokenizer, given: Mapping[str, Any], keys: Keys, tokens: list[str], into: Path) -> None:
    named = {name: keys.token(key) for name, key in _SPECIAL.items()}
    special = {name: tokens[id] for name, id in named.items() if id is not None and id < len(tokens)}
    metadata = keys.file.metadata
    begins = given.get("tokenizer_type") == "llama" or given.get("pre_tokenizer_type") in _BEGINS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        add_bos_token=bool(metadata.get("tokenizer.ggml.add_bos_token", begins)) and "bos_token" in special,
        add_eos_token=bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in special,
        clean_up_tokenization_spaces=False,
        **special,
    )
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokenizer.chat_template = template
    tokenizer.save_pretrained(into)
