"""The growth of a text by a tokenizer is known before it runs, and never exceeds the bound."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from aegis.core.errors import ModelRefused
from aegis.models.text import tokenizer_bounds
from aegis.models.text.tokenizer_bounds import refuse_growing
from tests import checkpoints


def string(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def regex(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def charsmap(replacement: str) -> str:
    return base64.b64encode((4).to_bytes(4, "little") + b"trie" + b"a\0" + replacement.encode() + b"\0").decode()


def look_at(directory: Path, **parts: Any) -> None:
    file = directory / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0}}} | parts))
    refuse_growing(file)


def sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


GROWING: dict[str, tuple[dict[str, Any], str]] = {
    "one": (string("e", "e" * 3000), "3000 times"),
    "steps": (sequence("normalizers", *[string("e", "e" * 100)] * 2), "10000 times"),
    "within steps": (
        sequence("normalizers", sequence("normalizers", string("e", "e" * 100)), string("e", "e" * 100)),
        "10000 times",
    ),
    "nothing becomes something": (string("", "e" * 3000), "3001 times"),
    "a pattern": (regex("e*", "e" * 3000), "3001 times"),
    "prepended": (sequence("normalizers", *[{"type": "Prepend", "prepend": "e" * 99}] * 2), "10000 times"),
    "unicode": (sequence("normalizers", *[{"type": "NFKD"}] * 3), "5832 times"),
    "a charsmap": ({"type": "Precompiled", "precompiled_charsmap": charsmap("e" * 3000)}, "3000 times"),
    "without end": (sequence("normalizers", *[string("e", "e" * 10_000)] * 60), "over 10.9 times"),
    "many steps": (sequence("normalizers", *[{"type": "Strip"}] * 65), "more than 64 normalizers"),
}


def test_a_large_tokenizer_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.touch()
    os.truncate(file, tokenizer_bounds.BYTES_MAX + (1 << 20))
    with pytest.raises(ModelRefused, match="has 41 MiB, at most 40 are accepted"):
        refuse_growing(file)


def test_very_many_tokens_are_refused(tmp_path: Path) -> None:
    many = dict.fromkeys(map(str, range(tokenizer_bounds.ENTRIES_MAX + 1)), 0)
    with pytest.raises(ModelRefused, match="it has 524289 tokens, at most 524288"):
        look_at(tmp_path, model={"vocab": many})
    added = [{"content": "x"}] * (tokenizer_bounds.ADDED_MAX + 1)
    with pytest.raises(ModelRefused, match="it has 32769 added tokens, at most 32768"):
        look_at(tmp_path, added_tokens=added)


@pytest.mark.parametrize("name", GROWING)
def test_a_normalizer_that_grows_texts_is_refused(name: str, tmp_path: Path) -> None:
    normalizer, said = GROWING[name]
    with pytest.raises(ModelRefused, match=said):
        look_at(tmp_path, normalizer=normalizer)


DECODERS: dict[str, tuple[dict[str, Any], str]] = {
    "a pattern that may take any time": (regex("(a+)+$", ""), "which may take any time"),
    "a repetition before the end": (regex("a+b", ""), "which may take any time"),
    "a pattern that calls itself": (regex(r"\g<0>", ""), "which may take any time"),
    "a long pattern": (string("a" * 129, ""), "which may take any time"),
    "growth": (sequence("decoders", *[string("a", "a" * 1000)] * 2), "a token may stand for 1000000 characters"),
    "many steps": (sequence("decoders", *[{"type": "Fuse"}] * 65), "more than 64 decoders"),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_that_may_take_any_time_is_refused(name: str, tmp_path: Path) -> None:
    decoder, said = DECODERS[name]
    with pytest.raises(ModelRefused, match=said):
        look_at(tmp_path, decoder=decoder)


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"vocab": {"a" * 70_000: 0}}},
        {"model": {"vocab": [["a" * 70_000, 0.0]]}},
        {"added_tokens": [{"content": "a" * 70_000}]},
    ],
)
def test_tokens_of_any_length_are_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="a token may stand for 70000 characters, at most 65536"):
        look_at(tmp_path, **parts)


LLAMA = sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, string(" ", "▁"))
ALBERT = sequence(
    "normalizers",
    string("``", '"'),
    {"type": "NFKD"},
    {"type": "StripAccents"},
    {"type": "Lowercase"},
    {"type": "Precompiled", "precompiled_charsmap": charsmap("e" * 18)},
    regex(" {2,}", " "),
)
WHOLE = sequence("decoders", string("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, regex("^ ", ""))


@pytest.mark.parametrize(
    "parts",
    [{}, {"normalizer": LLAMA}, {"normalizer": ALBERT}, {"normalizer": {"type": "New"}}, {"decoder": WHOLE}],
)
def test_tokenizers_as_they_are_pass(parts: dict[str, Any], tmp_path: Path) -> None:
    look_at(tmp_path, **parts)


def test_a_tokenizer_that_was_trained_passes(tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path)
    refuse_growing(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", ["{", "[]", '{"normalizer": {"normalizers": []}}', '{"decoder": {"type": "Replace"}}'])
def test_what_cannot_be_told_does_not_pass(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises((LookupError, TypeError, ValueError)):
        refuse_growing(tmp_path / "tokenizer.json")


TEXTS = ["a", "\ufdfa", "\u0390", "\u0344", "\U0001d160", "\u0130", "\u6771", "\ufb2c", "\u1fb7"]


@pytest.mark.parametrize("kind", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer", "ByteLevel"])
def test_no_kind_makes_more_of_a_character_than_is_said(kind: str) -> None:
    normalizer = getattr(normalizers, kind)()
    grown = max(len(normalizer.normalize_str(text)) for text in TEXTS)
    assert grown <= tokenizer_bounds._normalized({"type": kind})


def test_replacements_grow_texts_as_is_said() -> None:
    for pattern, content in (("", "xyz"), ("ab", "vwxyz"), (Regex("a*"), "xyz")):
        kind = "String" if isinstance(pattern, str) else "Regex"
        step = json.loads(tokenizer_of(pattern, content).to_str())["decoder"]
        assert step["pattern"].keys() == {kind}
        for text in ("ab" * 50, "b" * 100):
            grown = len(decoders.Replace(pattern, content).decode([text])) - len(content)  # behind the last, once
            assert grown <= len(text) * tokenizer_bounds._replaced(step)


def tokenizer_of(pattern: str | Regex, content: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Replace(pattern, content)
    return tokenizer
