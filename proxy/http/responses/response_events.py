"""From the parts of a reply to the events of OpenAI's response streams, and to the items of its output: the same text.

The order of events, which `tests/event_laws.py` states as laws: `response.created` and `response.in_progress`; each
item's `output_item.added`, the events of its content and `output_item.done`, one item after the other;
`response.completed`, `response.incomplete` or `response.failed`, always. `sequence_number` counts them from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct, field, structs

from proxy.http.openai.chat_replies import TokenLogprob
from proxy.http.responses.response_items import (
    CallItem,
    Item,
    MessageItem,
    OutputText,
    Progress,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
)
from proxy.http.streaming.reply_parts import CallArguments, CallBegun, Part, ReasoningPart, TextPart

CONTENT = 0
"""The index of the one part of content that an item has."""


class ResponseEvent(Struct, frozen=True, kw_only=True):
    sequence_number: int


class ResponseCreated(ResponseEvent, frozen=True, tag="response.created"):
    response: ResponseObject


class ResponseInProgress(ResponseEvent, frozen=True, tag="response.in_progress"):
    response: ResponseObject


class ResponseCompleted(ResponseEvent, frozen=True, tag="response.completed"):
    response: ResponseObject


class ResponseIncomplete(ResponseEvent, frozen=True, tag="response.incomplete"):
    response: ResponseObject


class ResponseFailed(ResponseEvent, frozen=True, tag="response.failed"):
    response: ResponseObject


class ItemEvent(ResponseEvent, frozen=True, kw_only=True):
    output_index: int


class ItemAdded(ItemEvent, frozen=True, tag="response.output_item.added"):
    item: Item


class ItemDone(ItemEvent, frozen=True, tag="response.output_item.done"):
    item: Item


class InnerEvent(ItemEvent, frozen=True, kw_only=True):
    item_id: str


class ContentEvent(InnerEvent, frozen=True, kw_only=True):
    content_index: int = CONTENT


class PartAdded(ContentEvent, frozen=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(ContentEvent, frozen=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(ContentEvent, frozen=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob] = field(default_factory=list)


class TextDone(ContentEvent, frozen=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ReasoningDelta(ContentEvent, frozen=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(ContentEvent, frozen=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(InnerEvent, frozen=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(InnerEvent, frozen=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


_LAST: dict[str, type[ResponseCompleted | ResponseIncomplete | ResponseFailed]] = {
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "cancelled": ResponseIncomplete,
    "failed": ResponseFailed,
}


class ResponseEvents:
    """`output` are the items that are done. `name_item` gives the id of an item by its kind and place, `name_call` that
    of the reply's call number so and so."""

    def __init__(self, name_item: Callable[[str, int], str], name_call: Callable[[int], str]) -> None:
        self.output: list[Item] = []
        self.begun = False
        self._name_item = name_item
        self._name_call = name_call
        self._number = 0
        self._item: Item | None = None  # that is open
        self._said = ""  # of it
        self._logprobs: list[TokenLogprob] = []

    def begin(self, response: ResponseObject) -> list[ResponseEvent]:
        self.begun = True
        return [
            ResponseCreated(sequence_number=self._next(), response=response),
            ResponseInProgress(sequence_number=self._next(), response=response),
        ]

    def take(self, parts: Iterable[Part], logprobs: Sequence[TokenLogprob] = ()) -> list[ResponseEvent]:
        """`logprobs` are those of the text, if there is any among the parts."""
        events = list[ResponseEvent]()
        for part in parts:
            events += self._take(part, logprobs)
            if isinstance(part, TextPart):
                logprobs = ()
        return events

    def close(self, status: Progress) -> list[ResponseEvent]:
        """The reply has no further parts, or no further one of the item that is open, which ends with this status."""
        item, text, logprobs = self._item, self._said, self._logprobs
        if item is None:
            return []
        self._item, self._said, self._logprobs = None, "", []
        match item:
            case CallItem():
                done: Item = structs.replace(item, status=status, arguments=text)
                events = [self._at(ArgumentsDone, item, name=item.name, arguments=text)]
            case MessageItem():
                told = OutputText(text, logprobs=logprobs)
                done = structs.replace(item, status=status, content=[told])
                end = self._at(TextDone, item, text=text, logprobs=logprobs)
                events = [end, self._at(PartDone, item, part=told)]
            case ReasoningItem():
                thought = ReasoningText(text)
                done = structs.replace(item, status=status, content=[thought])
                events = [self._at(ReasoningDone, item, text=text), self._at(PartDone, item, part=thought)]
        events.append(ItemDone(sequence_number=self._next(), output_index=len(self.output), item=done))
        self.output.append(done)
        return events

    def end(self, response: ResponseObject) -> list[ResponseEvent]:
        """The last event of the stream, which depends on the status of the response."""
        return [_LAST[response.status](sequence_number=self._next(), response=response)]

    def _take(self, part: Part, logprobs: Sequence[TokenLogprob]) -> list[ResponseEvent]:
        begun: list[ResponseEvent] = []
        match part:
            case TextPart(text):
                if not isinstance(self._item, MessageItem):
                    begun = self._begin(MessageItem(self._id("msg"), "in_progress"), OutputText(""))
                self._logprobs += logprobs
                return [*begun, self._say(TextDelta, text, logprobs=list(logprobs))]
            case ReasoningPart(text):
                if not isinstance(self._item, ReasoningItem):
                    begun = self._begin(ReasoningItem(self._id("rs"), "in_progress"), ReasoningText(""))
                return [*begun, self._say(ReasoningDelta, text)]
            case CallBegun(call, name):
                return self._begin(CallItem(self._id("fc"), "in_progress", self._name_call(call), name), None)
            case CallArguments(_, text):
                return [self._say(ArgumentsDelta, text)]

    def _id(self, kind: str) -> str:
        """The id of the next item, which comes after the open one, if any is."""
        return self._name_item(kind, len(self.output) + (self._item is not None))

    def _begin(self, item: Item, part: OutputText | ReasoningText | None) -> list[ResponseEvent]:
        events = self.close("completed")
        self._item = item
        events.append(ItemAdded(sequence_number=self._next(), output_index=len(self.output), item=item))
        return events if part is None else [*events, self._at(PartAdded, item, part=part)]

    def _say(self, kind: type[TextDelta | ReasoningDelta | ArgumentsDelta], text: str, **values: Any) -> ResponseEvent:
        assert self._item is not None
        self._said += text
        return self._at(kind, self._item, delta=text, **values)

    def _at(self, kind: type[InnerEvent], item: Item, **values: Any) -> ResponseEvent:
        return kind(sequence_number=self._next(), output_index=len(self.output), item_id=item.id, **values)

    def _next(self) -> int:
        self._number += 1
        return self._number - 1
