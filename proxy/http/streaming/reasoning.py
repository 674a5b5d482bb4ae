"""Splits reasoning off where a model's chat template marks it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from proxy.http.streaming.reply_parts import Part, ReasoningPart, TextPart, held


class ReasoningMarks(Struct, frozen=True):
    begin: str
    end: str


_MARKS = (ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]"))


def marks_of(chat_template: str) -> ReasoningMarks | None:
    return next((marks for marks in _MARKS if marks.end in chat_template), None)


class ReasoningSplitter:
    """`open`: the prompt ends with the begin mark. Marks are no text, nor are blanks around them."""

    def __init__(self, marks: ReasoningMarks, prompt: str) -> None:
        self._marks = marks
        self._waiting = ""
        self.thought_characters = 0
        """Of the text so far, with the marks; all of it while it goes on."""

        self._mode: Literal["start", "thought", "answer"] = (
            "thought" if prompt.rstrip().endswith(marks.begin) else "start"
        )
        self._fresh = True  # nothing of this mode was told yet
        self._fed = 0

    @property
    def mode(self) -> Literal["start", "thought", "answer"]:
        """Whether what was fed last is reasoning; `start`: nobody knows yet."""
        return self._mode

    @property
    def held(self) -> int:
        """Characters of the text that wait for what follows."""
        return len(self._waiting)

    def feed(self, text: str) -> list[Part]:
        self._fed += len(text)
        self._waiting += text
        parts: list[Part] = []
        if self._mode == "start":
            bare = self._waiting.lstrip()
            if bare.startswith(self._marks.begin):
                self._mode, self._waiting = "thought", bare[len(self._marks.begin) :]
            elif not self._marks.begin.startswith(bare):
                self._mode, self._fresh = "answer", False
        if self._mode == "thought":
            before, found, after = self._waiting.partition(self._marks.end)
            keep = 0 if found else held(before, self._marks.end)
            told = before.rstrip() if found else before[: len(before) - keep]
            self._append(parts, told, ReasoningPart)
            self._waiting = after if found else before[len(before) - keep :]
            self.thought_characters = self._fed - len(after)
            if found:
                self._mode, self._fresh = "answer", True
        if self._mode == "answer":
            self._append(parts, self._waiting, TextPart)
            self._waiting = ""
        return parts

    def end(self) -> list[Part]:
        waiting, self._waiting = self._waiting, ""
        kind = ReasoningPart if self._mode == "thought" else TextPart
        return [kind(waiting)] if waiting else []

    def _append(self, parts: list[Part], text: str, kind: type[TextPart | ReasoningPart]) -> None:
        if self._fresh:
            text = text.lstrip()
        if text:
            self._fresh = False
            parts.append(kind(text))
