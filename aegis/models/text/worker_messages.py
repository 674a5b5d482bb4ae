"""Messages to and from a process that works on texts: messages that are sent together are answered together, behind
their length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from aegis.models.text.text_model import TextSource

LENGTH_BYTES = 4
KNOWN_MAX = 32
"""Models that a process knows at a time, and so the most whose jobs one message may have."""

ANSWERS_BYTES_MAX = 16 << 20
"""Of one message, with an equal share for each job: the proxy holds it once as bytes and once decoded."""


class Know(Struct, frozen=True, tag=True):
    """A model's tokenizer and chat template, under a number that later jobs name. `forget` is forgotten: the sender
    chooses it, because it knows which models its next jobs need."""

    key: int
    source: TextSource
    forget: int | None = None


class Known(Struct, frozen=True, tag=True):
    """The text model is known."""


class Encode(Struct, frozen=True, tag=True):
    key: int
    texts: tuple[str, ...]
    special: bool
    tokens_max: int  # of each


class Fit(Struct, frozen=True, tag=True):
    """For a model that pools: texts, or pairs of them, with special tokens, each cut to `most` tokens if it is given. A
    pair is cut where it is longest."""

    key: int
    texts: tuple[str | tuple[str, str], ...]
    most: int | None
    tokens_max: int  # of each


class Count(Struct, frozen=True, tag=True):
    """All tokens of a text, as JSON, because nothing computes with them."""

    key: int
    text: str
    special: bool


class Decode(Struct, frozen=True, tag=True):
    key: int
    tokens: tuple[int, ...]


class Conversation(Struct, frozen=True):
    messages: Sequence[dict[str, Any]]
    variables: dict[str, Any]


class Render(Struct, frozen=True, tag=True):
    """A conversation as text and, unless `tokens_max` is 0, as tokens. A text of more than `characters_max` is not
    tokenized. `conversation` is a `Conversation` as JSON: no message holds an integer beyond 64 bits, and models call
    tools with such."""

    key: int
    conversation: bytes
    add_generation_prompt: bool
    characters_max: int
    tokens_max: int


Job = Encode | Fit | Count | Decode | Render


class Encoded(Struct, frozen=True, tag=True):
    texts: tuple[tuple[int, ...], ...]


class Fitted(Struct, frozen=True, tag=True):
    """With the place in each where the second text begins, if it has tokens of another type; else 0."""

    texts: tuple[tuple[int, ...], ...]
    pairs_at: tuple[int, ...]


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


class TooLarge(Struct, frozen=True, tag=True):
    """The answer takes more than its share of `ANSWERS_BYTES_MAX`."""

    nbytes: int


class Refused(Struct, frozen=True, tag=True):
    """The conversation is refused by the chat template, or for what that makes of it."""

    message: str


Answer = (
    Known | Encoded | Fitted | Counted | Decoded | Rendered | TooManyTokens | TooManyCharacters | TooLarge | Refused
)

write_conversation = msgspec.json.Encoder().encode
read_conversation = msgspec.json.Decoder(Conversation).decode
_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(tuple[Answer, ...])
_requests = msgspec.msgpack.Decoder(tuple[Know | Job, ...])


def encoded(message: Struct) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(message))


def framed(messages: Sequence[Struct | msgspec.Raw]) -> bytes:
    data = _encoder.encode(messages)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def read_requests(data: bytes) -> tuple[Know | Job, ...]:
    requests: tuple[Know | Job, ...] = _requests.decode(data)
    return requests


def read_answers(data: bytearray) -> tuple[Answer, ...]:
    answers: tuple[Answer, ...] = _answers.decode(data)
    return answers
