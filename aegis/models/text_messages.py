"""What is said to a process that works on texts, and what it answers, each message behind its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from aegis.models.text import TextSource

LENGTH_BYTES = 4
KNOWN_MAX = 32


class Know(Struct, frozen=True, tag=True):
    """A model's tokenizer and chat template, under a number that later jobs name. Of more than `KNOWN_MAX`
    the one that was told first is forgotten."""

    key: int
    source: TextSource


class Known(Struct, frozen=True, tag=True):
    """It is."""


class Encode(Struct, frozen=True, tag=True):
    key: int
    texts: tuple[str, ...]
    special: bool
    tokens_max: int  # of each


class Count(Struct, frozen=True, tag=True):
    """All tokens of a text, as JSON: nobody computes with them."""

    key: int
    text: str
    special: bool


class Decode(Struct, frozen=True, tag=True):
    key: int
    tokens: tuple[int, ...]


class Render(Struct, frozen=True, tag=True):
    """A conversation as text and, unless `tokens_max` is 0, as tokens. A text of more than `characters_max` is not
    tokenized."""

    key: int
    messages: Sequence[dict[str, Any]]
    variables: dict[str, Any]
    add_generation_prompt: bool
    characters_max: int
    tokens_max: int


Job = Encode | Count | Decode | Render


class Encoded(Struct, frozen=True, tag=True):
    texts: tuple[tuple[int, ...], ...]


class Counted(Struct, frozen=True, tag=True):
    count: int
    tokens_json: bytes


class Decoded(Struct, frozen=True, tag=True):
    text: str


class Rendered(Struct, frozen=True, tag=True):
    text: str
    tokens: tuple[int, ...]


class TooManyTokens(Struct, frozen=True, tag=True):
    count: int


class TooManyCharacters(Struct, frozen=True, tag=True):
    count: int


class Refused(Struct, frozen=True, tag=True):
    """By the chat template, or by what it makes of the conversation."""

    message: str


class Exhausted(Struct, frozen=True, tag=True):
    """It took more memory than there is for it; the process ends."""


Answer = Known | Encoded | Counted | Decoded | Rendered | TooManyTokens | TooManyCharacters | Refused | Exhausted

_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)
_asked = msgspec.msgpack.Decoder(Know | Job)


def framed(message: Struct) -> bytes:
    """Raises RecursionError and OverflowError for values of a client that no message holds."""
    data = _encoder.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def read_asked(data: bytes) -> Know | Job:
    asked: Know | Job = _asked.decode(data)
    return asked


def read_answer(data: bytes) -> Answer:
    answer: Answer = _answers.decode(data)
    return answer
