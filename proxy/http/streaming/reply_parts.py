"""The parts of the text of a chat reply."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class TextPart(Struct, frozen=True):
    text: str


class ReasoningPart(Struct, frozen=True):
    """Reasoning, which precedes the answer."""

    text: str


class CallBegun(Struct, frozen=True):
    """A call of the tool `name`, the reply's number `index`."""

    index: int
    name: str


class CallArguments(Struct, frozen=True):
    """The next of its arguments' JSON."""

    index: int
    text: str


Part = TextPart | ReasoningPart | CallBegun | CallArguments


def held(text: str, marker: str) -> int:
    """The number of characters at the end of `text` that may begin `marker`, or blanks before it."""
    for length in range(min(len(text), len(marker) - 1), -1, -1):
        if text.endswith(marker[:length]):
            return len(text) - len(text[: len(text) - length].rstrip())
    return 0


def texts_as_one(parts: Sequence[Part]) -> list[Part]:
    """The parts, with texts that follow each other as one."""
    told = list[Part]()
    for part in parts:
        if isinstance(part, TextPart) and told and isinstance(told[-1], TextPart):
            told[-1] = TextPart(told[-1].text + part.text)
        else:
            told.append(part)
    return told


def text_parts(text: str) -> Sequence[Part]:
    return (TextPart(text),) if text else ()
