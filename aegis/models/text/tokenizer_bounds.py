"""Bounds on the growth of a text by a tokenizer, read from its `tokenizer.json` before anything runs it.

Normalizers grow a prompt and decoders grow an answer. Each kind makes at most so many characters of one; a sequence of
them makes the product.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from aegis.core.errors import ModelRefused

GROWTH_MAX = 2048
"""Of a prompt. ALBERT's four unicode steps in a row have 1296."""

DECODED_CHARACTERS_MAX = 1 << 16
"""The characters that one token may stand for. A proxy decodes between two events."""

BYTES_MAX = 40 << 20
"""Of `tokenizer.json`. Those of 262 144 tokens that transformers writes have 33 MiB."""

ENTRIES_MAX = 1 << 19
ADDED_MAX = 1 << 15
STEPS_MAX = 64
PATTERN_CHARACTERS_MAX = 128
"""The characters that a decoder may replace."""

_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18}
_NORMALIZERS = _UNICODE | {"Lowercase": 2, "BertNormalizer": 3 * 4 * 2, "ByteLevel": 4}
_DECODERS = {"BPEDecoder": 2, "CTC": 2, "WordPiece": 2}  # which may put a space for nothing

_REPEATED = r"(?:[+*?]|\{\d{1,2}(?:,\d{0,2})?\})?"
_LINEAR = re.compile(r"\^?(?:\\[sdwWDSntr]|\\[^\w\s]|[^\\^$.|?*+(){}\[\]])+" + _REPEATED)
"""Patterns that look at each character of a text a few times at most: characters one after the other, the last of them
any number of times."""


class _Model(Struct, frozen=True):
    vocab: dict[str, Any] | list[list[Any]] | None = None


class _Tokenizer(Struct, frozen=True):
    normalizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    model: _Model = _Model()
    added_tokens: list[dict[str, Any]] = []


def refuse_growing(tokenizer_json: Path) -> None:
    """Raises ModelRefused if texts may grow without measure, or decoding take time without measure; ValueError,
    LookupError or TypeError where that cannot be told. Raises ModelRefused, too, if it is too large."""
    nbytes = tokenizer_json.stat().st_size
    if nbytes > BYTES_MAX:
        raise ModelRefused(f"tokenizer.json has {nbytes >> 20} MiB, at most {BYTES_MAX >> 20} are accepted")
    try:
        tokenizer = msgspec.json.decode(tokenizer_json.read_bytes(), type=_Tokenizer)
    except msgspec.MsgspecError as error:
        raise ValueError(f"tokenizer.json: {error}") from error
    _refuse_many(tokenizer)
    growth = prod(map(_normalized, _steps(tokenizer.normalizer, "normalizers")))
    decoded = prod(map(_decoded, _steps(tokenizer.decoder, "decoders")))
    longest = max(map(len, _tokens(tokenizer)), default=0)
    if growth > GROWTH_MAX:
        raise ModelRefused(
            f"tokenizer.json: its normalizer may make a text {_shown(growth)} times as long, at most {GROWTH_MAX} is "
            "accepted"
        )
    if longest * decoded > DECODED_CHARACTERS_MAX:
        raise ModelRefused(
            f"tokenizer.json: a token may stand for {_shown(longest * decoded)} characters, at most "
            f"{DECODED_CHARACTERS_MAX} are accepted"
        )


def _refuse_many(tokenizer: _Tokenizer) -> None:
    """Each proxy has a table of them."""
    added = len(tokenizer.added_tokens)
    for what, count, most in (
        ("tokens", len(tokenizer.model.vocab or ()) + added, ENTRIES_MAX),
        ("added tokens", added, ADDED_MAX),
    ):
        if count > most:
            raise ModelRefused(f"tokenizer.json: it has {count} {what}, at most {most} are accepted")


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Sequences among them. Raises ModelRefused if there are too many."""
    found, left = list[dict[str, Any]](), [part] if part else []
    while left:
        step = left.pop()
        found.append(step)
        if step["type"] == "Sequence":
            left += step[name]
        if len(found) + len(left) > STEPS_MAX:
            raise ModelRefused(
                f"tokenizer.json: it has more than {STEPS_MAX} {name}, which is the most that is accepted"
            )
    return found


def _normalized(step: dict[str, Any]) -> float:
    match step["type"]:
        case "Replace":
            return _replaced(step)
        case "Prepend":
            return 1 + len(step["prepend"])
        case "Precompiled":
            return max(1, _longest_replacement(step["precompiled_charsmap"]))
        case kind:
            return _NORMALIZERS.get(kind, 1)


def _decoded(step: dict[str, Any]) -> float:
    """Raises ModelRefused."""
    if step["type"] != "Replace":
        return _DECODERS.get(step["type"], 1)
    ((kind, pattern),) = step["pattern"].items()
    if len(pattern) > PATTERN_CHARACTERS_MAX or (kind == "Regex" and not _LINEAR.fullmatch(pattern)):
        raise ModelRefused(
            f"tokenizer.json: its decoder replaces {pattern[:40]!r}, which may take any time; accepted are up to "
            f"{PATTERN_CHARACTERS_MAX} plain characters, the last of which may be repeated"
        )
    return _replaced(step)


def _replaced(step: dict[str, Any]) -> float:
    content, pattern = len(step["content"]), step["pattern"]
    text = pattern.get("String")
    if not text:  # a pattern, or nothing, which is found before each character
        return 1 + content
    return max(1.0, content / len(text))


def _longest_replacement(charsmap: str | None) -> int:
    """SentencePiece's: the size of a trie, the trie, and all replacements, each ended by a zero."""
    data = base64.b64decode(charsmap or "")
    replacements = data[4 + int.from_bytes(data[:4], "little") :]
    return max(len(each.decode(errors="replace")) for each in replacements.split(b"\0"))


def _tokens(tokenizer: _Tokenizer) -> Iterator[str]:
    vocabulary = tokenizer.model.vocab or {}
    yield from vocabulary if isinstance(vocabulary, dict) else (entry[0] for entry in vocabulary)
    yield from (added["content"] for added in tokenizer.added_tokens)


def _shown(number: float) -> str:
    return f"{number:.0f}" if number < 1e9 else "over 10^9"
