"""Grammars compiled for a vocabulary, which tell of every token whether it may come next (XGrammar, Dong et al., 2024).

Special tokens have no text, so no grammar ever allows one, but for the model's end tokens where output may end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import xgrammar
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from aegis.core.request import Grammar
from aegis.engine.grammar.parsed import Kind, Parsed, parse
from aegis.process.error_lines import flattened

_NAMES = {
    "json_schema": "JSON Schema",
    "regex": "regular expression",
    "ebnf": "grammar",
    "structural_tag": "structural tag",
}
_SOURCE = re.compile(
    r"^(?:\[[\d:]+\] )?\S+\.(?:cc|h):\d+: (?:Check failed: .*? is false: )?(?:Invalid structural tag error: )?"
)
_PLACE = re.compile(r"^(?:EBNF|Regex) \w+ error at ((line|position) [^:]*: )")
_OWN_PLACES = {"ebnf": "line", "regex": "position"}
"""Messages of XGrammar about its own translation of the client's text: their place is not a place in that text."""

_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")
"""In a grammar that XGrammar wrote. It reads as many digits after `\\x` as there are, so also those of the text."""

_MAY_NAME_SURROGATE = re.compile("d[89a-f][0-9a-f]{2}", re.IGNORECASE)
"""In the client's text, whatever it is escaped with."""

_REASON_CHARACTERS = 120
_CONTROLS = frozenset(range(0x20))
_SURROGATES = range(0xD800, 0xE000)
_LEAD, _CONTINUATIONS = 0xED, range(0xA0, 0xC0)
"""The first byte that a surrogate would have in UTF-8, which has none, and the second: XGrammar takes surrogates for
characters."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The texts of a model's tokens. `for_json` lacks control characters: JSON has them between its values only, where
    none are needed, and XGrammar would allow them in strings of bounded length. What ends in `leads` is not gone on
    with by `continuations`, a mask of tokens."""

    whole: xgrammar.TokenizerInfo
    for_json: xgrammar.TokenizerInfo
    leads: frozenset[int]
    continuations: torch.Tensor


@dataclass(frozen=True, slots=True)
class Compiled:
    grammar: xgrammar.CompiledGrammar
    vocabulary: Vocabulary

    @property
    def nbytes(self) -> int:
        return int(self.grammar.memory_size_bytes)


class GrammarRefused(ValueError):
    """The reason why outputs cannot be held to the grammar, on one line that begins with a verb."""


def read_vocabulary(tokenizer_json: str, *, size: int, ends: Sequence[int]) -> Vocabulary:
    """`size` is the model's, `ends` are its end tokens, at least one."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    kind = xgrammar.TokenizerInfo.from_huggingface(wrapped, vocab_size=size, stop_token_ids=list(ends))
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    texts = [""] * size
    for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token < size and token not in special:
            texts[token] = text
    found = xgrammar.TokenizerInfo(
        texts,
        kind.vocab_type,
        vocab_size=size,
        stop_token_ids=list(ends),
        add_prefix_space=kind.add_prefix_space,
    )
    spoken = [b"" if _has_surrogate(text) else text for text in found.decoded_vocab]
    printable = [b"" if _CONTROLS & set(text) else text for text in spoken]
    continuations = np.zeros(-(-size // 32) * 32, dtype=bool)
    continuations[:size] = [bool(text) and text[0] in _CONTINUATIONS for text in spoken]
    return Vocabulary(
        xgrammar.TokenizerInfo(spoken, vocab_size=size, stop_token_ids=list(ends)),
        xgrammar.TokenizerInfo(printable, vocab_size=size, stop_token_ids=list(ends)),
        frozenset(token for token, text in enumerate(spoken) if text.endswith(bytes([_LEAD]))),
        torch.from_numpy(np.packbits(continuations, bitorder="little").view(np.int32)),
    )


def _has_surrogate(text: bytes) -> bool:
    return any(one == _LEAD and next in _CONTINUATIONS for one, next in pairwise(text))


def compile_grammar(vocabulary: Vocabulary, grammar: Grammar) -> Compiled:
    """Takes from microseconds to minutes, and as a rule lets other threads run. Raises GrammarRefused."""
    info = vocabulary.for_json if grammar.kind == "json_schema" else vocabulary.whole
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    compile_it = {
        "json_schema": partial(compiler.compile_json_schema, any_whitespace=False),
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "structural_tag": lambda text: compiler.compile_structural_tag(_without_blanks(text)),
    }[grammar.kind]
    try:
        compiled = compile_it(grammar.text)
        has_surrogate = _MAY_NAME_SURROGATE.search(grammar.text) and _names_surrogate(parse(grammar))
    except (RuntimeError, ValueError) as error:
        reason = _reason(grammar.kind, str(error))
        says = f"; XGrammar says {reason!r}" if reason else ""
        raise GrammarRefused(f"is no {_NAMES[grammar.kind]} that outputs can be held to{says}") from None
    if has_surrogate:
        raise GrammarRefused(
            "names half of a surrogate pair (\\ud800 to \\udfff), which no text has; write the character itself"
        )
    return Compiled(compiled, vocabulary)


def _names_surrogate(parsed: Parsed) -> bool:
    """Whether it does so in a text, or at an end of a range of a class, but for those of all characters but some."""
    for kind, values in parsed.expressions():
        match kind:
            case Kind.TEXT if _has_surrogate(_bytes_of(values)):
                return True
            case Kind.CHARACTERS | Kind.REPEATED if not values[0] and any(end in _SURROGATES for end in values[1:]):
                return True
            case Kind.REGEX:  # of a JSON Schema
                pattern = _bytes_of(values[1:])
                if _has_surrogate(pattern) or _names_surrogate(parse(Grammar("regex", pattern.decode()))):
                    return True
    return False


def _bytes_of(values: Sequence[int]) -> bytes:
    """Some of XGrammar's bytes are signed."""
    return bytes(value & 0xFF for value in values)


def _without_blanks(structural_tag: str) -> str:
    """The same structural tag, but that its JSON has no more blanks than that of a JSON Schema alone."""
    try:
        return json.dumps(_with_grammars(json.loads(structural_tag)))
    except (ValueError, RecursionError):  # XGrammar says what is wrong with it
        return structural_tag


def _with_grammars(form: Any) -> Any:
    """With grammars in place of JSON Schemas, in which XGrammar allows any blanks here and cannot be told otherwise."""
    if isinstance(form, list):
        return [_with_grammars(each) for each in form]
    if not isinstance(form, dict):
        return form
    if form.get("type") != "json_schema":
        return {key: _with_grammars(value) for key, value in form.items()}
    if {"style": "json", **form} != {"type": "json_schema", "json_schema": form.get("json_schema"), "style": "json"}:
        return form  # the client has its own wishes, or it is wrong
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(form["json_schema"]), any_whitespace=False)
    text = _ESCAPE.sub(lambda escape: f"\\u00{escape[1]}" if escape[1] else escape[0], str(grammar))
    return {"type": "grammar", "grammar": text}


def _reason(kind: str, message: str) -> str:
    """XGrammar's own, short and without places that are not the client's; empty if nothing else is left."""
    said, found = _SOURCE.subn("", flattened(message).rstrip(".:"))
    if place := _PLACE.match(said):
        said = said[place.start(1) if _OWN_PLACES.get(kind) == place[2] else place.end() :]
    if not found or _SOURCE.search(said):
        return ""
    return said if len(said) <= _REASON_CHARACTERS else said[:_REASON_CHARACTERS] + "…"
