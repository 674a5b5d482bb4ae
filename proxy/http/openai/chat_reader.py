"""Reads one choice of a chat reply: reasoning, text and tool calls, as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from proxy.http.streaming.reasoning import ReasoningMarks, ReasoningSplitter
from proxy.http.streaming.reply_parts import CallArguments, CallBegun, Part, TextPart, texts_as_one
from proxy.http.streaming.transcript import Piece, Scored
from proxy.http.structured.tools import Tools


class Reading(Struct, frozen=True):
    """The marks to look for in the replies to one request. `marks` are None if there are none, or none are looked
    for."""

    prompt: str
    marks: ReasoningMarks | None
    tools: Tools | None

    @property
    def plain(self) -> bool:
        """Whether all of it is text."""
        return self.marks is None and self.tools is None

    @property
    def markers(self) -> tuple[str, ...]:
        """The special tokens that have to be part of the text."""
        marks = (self.marks.begin, self.marks.end) if self.marks else ()
        form = self.tools.form if self.tools and self.tools.choice == "auto" else None
        return (*marks, *((form.begin, form.end, "[ARGS]", "[CALL_ID]") if form else ()))


class ChatReader:
    """`called`: a tool was. `reasoning_tokens`: so many tokens were reasoning, the marks among them."""

    def __init__(self, reading: Reading) -> None:
        self.called = False
        self.reasoning_tokens = 0
        self._undecided = 0  # tokens that are reasoning if what follows is
        self._splitter = ReasoningSplitter(reading.marks, reading.prompt) if reading.marks else None
        self._finder = reading.tools.finder() if reading.tools else None
        self._name = reading.tools.name if reading.tools else ""

    @property
    def held(self) -> int:
        """Characters at the end of the text that are not told yet: what they are is not known."""
        return (self._splitter.held if self._splitter else 0) + (self._finder.held if self._finder else 0)

    def read(self, piece: Piece) -> list[Part]:
        """`feed` with the next piece, whose tokens are counted."""
        parts = self.feed(piece.text, last=piece.finish is not None)
        if self._splitter:
            self._count(self._splitter, piece.tokens)
        return parts

    def _count(self, splitter: ReasoningSplitter, tokens: Sequence[Scored]) -> None:
        thought = splitter.thought_characters
        if splitter.mode == "start":
            self._undecided += len(tokens)
        elif splitter.mode == "thought" or thought:
            count = len(tokens) if splitter.mode == "thought" else sum(token.offset < thought for token in tokens)
            self.reasoning_tokens += self._undecided + count
            self._undecided = 0

    def feed(self, text: str, *, last: bool) -> list[Part]:
        """The content of the next piece of the reply's text; with the last piece, everything that waited. Texts that
        follow each other are one part."""
        parts: list[Part] = self._splitter.feed(text) if self._splitter else [TextPart(text)] if text else []
        if self._splitter and last:
            parts += self._splitter.end()
        return texts_as_one([*self._calls(parts), *(self._finder.end() if self._finder and last else ())])

    def _calls(self, parts: Iterable[Part]) -> Iterable[Part]:
        for part in parts:
            if not isinstance(part, TextPart):
                yield part
            elif self._finder:
                found = self._finder.feed(part.text)
                self.called = self.called or any(isinstance(each, CallBegun) for each in found)
                yield from found
            elif self._name:
                if not self.called:
                    yield CallBegun(0, self._name)
                self.called = True
                yield CallArguments(0, part.text)
            else:
                yield part
