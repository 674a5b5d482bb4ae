"""The part of a tokenizer that decodes, in a file of its own: proxies load no more of it, because all else in a process
waits while the library loads a tokenizer, 6 microseconds for each token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from aegis.device.image_directory import DETOKENIZER, TOKENIZER
from aegis.models.text.chat_template import read_special_tokens

_COMPARED_TOKENS = 64
_IDS_MAX = 1 << 20


class DetokenizerFile(Struct, frozen=True):
    """`texts` are the tokens by their ids, `special_ids` those that have no text for readers. `decoder` is the
    tokenizer's own, as JSON. `special` are special tokens by the names that templates use."""

    texts: list[str | None]
    special_ids: list[int]
    decoder: msgspec.Raw
    special: dict[str, str]


class Detokenizer:
    """Decodes as the whole tokenizer does (`tokenizers.Tokenizer.decode`)."""

    def __init__(self, found: DetokenizerFile) -> None:
        words = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
        shell = Tokenizer.from_buffer(
            msgspec.json.encode({"added_tokens": [], "decoder": found.decoder, "model": words})
        )
        self.special_ids = frozenset(found.special_ids)
        self.token_characters_max = max((len(text) for text in found.texts if text), default=1)
        self._texts = found.texts
        self._decoder = shell.decoder
        self._specials = {text: token for token in found.special_ids if (text := found.texts[token]) is not None}

    def special_id(self, text: str) -> int | None:
        """None if it is no special token."""
        return self._specials.get(text)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        texts, size = self._texts, len(self._texts)
        found = [text for token in tokens if token < size and (text := texts[token]) is not None]
        if skip_special_tokens and not self._specials.keys().isdisjoint(found):
            found = [text for text in found if text not in self._specials]
        if self._decoder is None:
            return " ".join(found)
        decoded: str = self._decoder.decode(found)
        return decoded


def write_detokenizer(directory: Path) -> None:
    """Writes a detokenizer beside the tokenizer in `directory`; none if it would not decode in the same way."""
    whole = Tokenizer.from_file(str(directory / TOKENIZER))
    parts: dict[str, Any] = msgspec.json.decode((directory / TOKENIZER).read_bytes())
    count = max(whole.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if count > _IDS_MAX:
        return
    special = sorted(token for token, entry in whole.get_added_tokens_decoder().items() if entry.special)
    found = DetokenizerFile(
        [whole.id_to_token(token) for token in range(count)],
        special,
        msgspec.Raw(msgspec.json.encode(parts.get("decoder"))),
        read_special_tokens(directory),
    )
    try:
        alike = _decode_alike(whole, Detokenizer(found))
    except Exception:  # noqa: BLE001 - the library has no type of its own
        return
    if alike:
        draft = directory / f"{DETOKENIZER}.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(found))
        draft.replace(directory / DETOKENIZER)


def read_detokenizer(directory: Path) -> DetokenizerFile | None:
    """None if the image has none, or that of an earlier version, or a damaged one."""
    file = directory / DETOKENIZER
    try:
        return msgspec.json.decode(file.read_bytes(), type=DetokenizerFile)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _decode_alike(whole: Tokenizer, found: Detokenizer) -> bool:
    ids = range(whole.get_vocab_size(with_added_tokens=True) + 1)
    for begin in range(0, len(ids), _COMPARED_TOKENS):
        some = list(ids[begin : begin + _COMPARED_TOKENS])
        for skips in (True, False):
            if whole.decode(some, skip_special_tokens=skips) != found.decode(some, skip_special_tokens=skips):
                return False
    return True
