"""The part of a tokenizer that decodes, in a file of its own: proxies load no more of it, because all else in a process
waits while a tokenizer is loaded. Merges, for instance, take most of that time, and only encoding needs them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from aegis.device.image_directory import DETOKENIZER, TOKENIZER
from aegis.models.text.chat_template import read_special_tokens

_COMPARED_TOKENS = 64


class Detokenizer(Struct, frozen=True):
    """`tokenizer` is the JSON of one that decodes the same and encodes nothing; `special` are the special tokens by the
    names that templates use."""

    tokenizer: msgspec.Raw
    token_characters_max: int
    special: dict[str, str]


def write_detokenizer(directory: Path) -> None:
    """Beside the tokenizer in `directory`; none if it would not decode in the same way."""
    whole = Tokenizer.from_file(str(directory / TOKENIZER))
    vocabulary: dict[str, int] = whole.get_vocab(with_added_tokens=True)
    parts: dict[str, Any] = msgspec.json.decode((directory / TOKENIZER).read_bytes())
    words = {"type": "WordLevel", "vocab": whole.get_vocab(with_added_tokens=False), "unk_token": ""}
    # The text of an added token may depend on the normalizer, which is left out.
    added = [
        entry | {"content": whole.id_to_token(entry["id"]), "normalized": False} for entry in parts["added_tokens"]
    ]
    kept = {"version": parts["version"], "added_tokens": added, "decoder": parts["decoder"]}
    data = msgspec.json.encode(kept | {"model": words})
    try:
        decoding = Tokenizer.from_buffer(data)
    except Exception:  # noqa: BLE001 - the library has no type of its own
        return
    if _decode_alike(whole, decoding, vocabulary.values()):
        longest = max(map(len, vocabulary), default=1)
        found = Detokenizer(msgspec.Raw(data), longest, read_special_tokens(directory))
        (directory / DETOKENIZER).write_bytes(msgspec.json.encode(found))


def read_detokenizer(directory: Path) -> Detokenizer | None:
    """None if the image has none."""
    file = directory / DETOKENIZER
    return msgspec.json.decode(file.read_bytes(), type=Detokenizer) if file.is_file() else None


def _decode_alike(one: Tokenizer, other: Tokenizer, ids: Iterable[int]) -> bool:
    if _special(one) != _special(other):
        return False
    known = sorted({*ids, *range(one.get_vocab_size(with_added_tokens=True) + 1)})
    for begin in range(0, len(known), _COMPARED_TOKENS):
        some = known[begin : begin + _COMPARED_TOKENS]
        if any(one.id_to_token(token) != other.id_to_token(token) for token in some):
            return False
        for skips in (True, False):
            if one.decode(some, skip_special_tokens=skips) != other.decode(some, skip_special_tokens=skips):
                return False
    return True


def _special(tokenizer: Tokenizer) -> dict[int, int | None]:
    """The special tokens, and which tokens their texts are."""
    added = tokenizer.get_added_tokens_decoder()
    return {token: tokenizer.token_to_id(entry.content) for token, entry in added.items() if entry.special}
