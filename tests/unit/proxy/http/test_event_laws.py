"""The events of messages and responses keep their laws for any reply, however it is cut, and say the same whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.errors import UserError
from proxy.http.anthropic.message_events import (
    Message,
    MessageDelta,
    MessageEvents,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputDetails,
    Stop,
    blocks_of,
)
from proxy.http.responses.response_events import ResponseEvents
from proxy.http.responses.response_items import InputDetails, ResponseObject, ResponseUsage
from proxy.http.responses.response_items import OutputDetails as ResponseOutputDetails
from proxy.http.responses.response_shape import failure
from proxy.http.streaming.reply_parts import CallArguments, CallBegun, Part, ReasoningPart, TextPart
from tests.event_laws import MESSAGE_LAWS, RESPONSE_LAWS, Event, Law, check_messages, check_responses, events_of

TEXT = st.text(min_size=1, max_size=6)
OBJECTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=4), max_size=3).map(json.dumps)


@st.composite
def replies(draw: st.DrawFn) -> list[list[Part]]:
    """The parts of a reply, in the pieces in which they come: reasoning, text and calls, each cut anywhere."""
    parts, calls = list[Part](), 0
    for kind in draw(st.lists(st.sampled_from(("reasoning", "text", "call")), max_size=6)):
        if kind == "call":
            parts.append(CallBegun(calls, draw(st.sampled_from("fgh"))))
            parts += [CallArguments(calls, text) for text in _cut(draw, draw(OBJECTS))]
            calls += 1
        else:
            made = TextPart if kind == "text" else ReasoningPart
            parts += [made(text) for text in draw(st.lists(TEXT, min_size=1, max_size=3))]
    cuts = sorted(draw(st.lists(st.integers(0, len(parts)), max_size=5)))
    return [parts[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(parts)], strict=True)]


def _cut(draw: st.DrawFn, text: str) -> list[str]:
    at = sorted({draw(st.integers(0, len(text))) for _ in range(2)} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(at)]


def plain(events: Sequence[msgspec.Struct]) -> list[Event]:
    return [msgspec.json.decode(msgspec.json.encode(event)) for event in events]


def message_stream(pieces: list[list[Part]], reason: str = "end_turn") -> list[Any]:
    usage = MessageUsage(3, 5, OutputDetails(2))
    events = MessageEvents(lambda call: f"c{call}")
    told: list[Any] = [MessageStart(Message("m", "m", [], None, None, usage))]
    for piece in pieces:
        told += events.take(piece)
    return [*told, *events.close(), MessageDelta(Stop(reason, None), usage), MessageStop()]


@given(replies())
def test_messages_keep_the_laws_and_are_the_same_whole(pieces: list[list[Part]]) -> None:
    parts = [part for piece in pieces for part in piece]
    called = any(isinstance(part, CallBegun) for part in parts)
    told = message_stream(pieces, "tool_use" if called else "end_turn")
    check_messages(plain(told))
    whole = MessageEvents(lambda call: f"c{call}")
    assert blocks_of(told) == blocks_of([*whole.take(parts), *whole.close()])
    blocks = plain(blocks_of(told))
    for block in blocks:
        assert block.pop("signature", "x")
        if "input" in block:
            block["input"] = json.dumps(block["input"])
    assert blocks == _merged_blocks(parts)


def _merged_blocks(parts: Sequence[Part]) -> list[Event]:
    """By hand, without signatures of thoughts, which are taken as they are."""
    blocks = list[Event]()
    for part in parts:
        match part:
            case TextPart(text) if blocks and blocks[-1]["type"] == "text":
                blocks[-1]["text"] += text
            case TextPart(text):
                blocks.append({"type": "text", "text": text})
            case ReasoningPart(text) if blocks and blocks[-1]["type"] == "thinking":
                blocks[-1]["thinking"] += text
            case ReasoningPart(text):
                blocks.append({"type": "thinking", "thinking": text})
            case CallBegun(index, name):
                blocks.append({"type": "tool_use", "id": f"c{index}", "name": name, "input": ""})
            case CallArguments(_, text):
                blocks[-1]["input"] += text
    return blocks


def response_stream(pieces: list[list[Part]], status: Any = "completed") -> list[Any]:
    head = ResponseObject(id="r", created_at=1, model="m")
    events = ResponseEvents(lambda kind, index: f"{kind}_{index}", lambda call: f"c{call}")
    told: list[Any] = events.begin(head)
    for piece in pieces:
        told += events.take(piece)
    told += events.close("completed" if status == "completed" else "incomplete")
    usage = ResponseUsage(3, InputDetails(1), 5, ResponseOutputDetails(2), 8)
    return [*told, *events.end(msgspec.structs.replace(head, status=status, output=events.output, usage=usage))]


@given(replies(), st.sampled_from(("completed", "incomplete", "cancelled")))
def test_responses_keep_the_laws_and_are_the_same_whole(pieces: list[list[Part]], status: str) -> None:
    told = plain(response_stream(pieces, status))
    check_responses(told)
    whole = plain(response_stream([[part for piece in pieces for part in piece]], status))
    assert told[-1]["response"] == whole[-1]["response"]


@given(replies(), st.booleans())
def test_responses_that_fail_keep_the_laws(pieces: list[list[Part]], begun: bool) -> None:
    head = ResponseObject(id="r", created_at=1, model="m")
    events = ResponseEvents(lambda kind, index: f"{kind}_{index}", lambda call: f"c{call}")
    told = events.begin(head) if begun else []
    for piece in pieces if begun else ():
        told += events.take(piece)
    last = events_of(failure(events, head, UserError("broke", status=500)).decode())
    check_responses([*plain(told), *last])


SAID: list[list[Part]] = [[ReasoningPart("a"), TextPart("b")], [CallBegun(0, "f"), CallArguments(0, "{}")]]
Spoil = Callable[[list[Event]], object]


def _of(events: list[Event], kind: str) -> Event:
    return next(event for event in events if event["type"] == kind)


def _swap(events: list[Event], first: int, second: int) -> None:
    events[first], events[second] = events[second], events[first]


@pytest.mark.parametrize(
    ("law", "spoil"),
    [
        (1, lambda events: events.pop(0)),
        (2, lambda events: events.append(events[0])),
        (3, lambda events: events.pop(-2)),
        (4, lambda events: _of(events, "content_block_stop").update(index=7)),
        (5, lambda events: _of(events, "content_block_delta").update(delta={"type": "text_delta", "text": "a"})),
        (6, lambda events: events.remove(next(e for e in events if "signature" in str(e.get("delta"))))),
        (7, lambda events: events[-4]["delta"].update(partial_json="{")),
        (8, lambda events: events[-2]["delta"].update(stop_sequence="x")),
    ],
)
def test_each_law_of_messages_sees_what_breaks_it(law: int, spoil: Spoil) -> None:
    _sees(MESSAGE_LAWS[law - 1], plain(message_stream(SAID, "tool_use")), spoil)


@pytest.mark.parametrize(
    ("law", "spoil"),
    [
        (1, lambda events: events.pop(3)),
        (2, lambda events: _swap(events, 0, 1)),
        (3, lambda events: events.pop()),
        (4, lambda events: _of(events, "response.output_item.done")["item"].update(id="x")),
        (5, lambda events: _of(events, "response.output_text.delta").update(item_id="x")),
        (6, lambda events: events.remove(_of(events, "response.content_part.added"))),
        (7, lambda events: _of(events, "response.output_text.done").update(text="x")),
        (8, lambda events: events[-1]["response"].update(output=[])),
        (9, lambda events: events[-1]["response"].update(id="x")),
        (10, lambda events: events[-1]["response"]["usage"].update(total_tokens=1)),
    ],
)
def test_each_law_of_responses_sees_what_breaks_it(law: int, spoil: Spoil) -> None:
    _sees(RESPONSE_LAWS[law - 1], plain(response_stream(SAID)), spoil)


def _sees(law: Law, events: list[Event], spoil: Spoil) -> None:
    law(events)
    spoil(events)
    with pytest.raises((AssertionError, ValueError)):
        law(events)
