"""Messages to and from the process that tries grammars out, each behind its length."""

from __future__ import annotations

from typing import IO, TypeVar

import msgspec
from msgspec import Struct

from aegis.core.request import Grammar

T = TypeVar("T")

_LENGTH_BYTES = 4


class Try(Struct, frozen=True):
    """Compile `grammar`, if there is one, for a vocabulary, and forget it. `tokenizer_json` is there where `vocabulary`
    is new."""

    vocabulary: str
    grammar: Grammar | None
    tokenizer_json: str | None
    size: int
    ends: tuple[int, ...]


class Tried(Struct, frozen=True):
    """`problem` is what there is against it, and begins with a verb."""

    problem: str | None


def write(pipe: IO[bytes], message: Struct) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def read(pipe: IO[bytes], kind: type[T]) -> T | None:
    """None at the end."""
    length = pipe.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    return msgspec.msgpack.decode(pipe.read(int.from_bytes(length, "little")), type=kind)
