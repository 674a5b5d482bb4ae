"""The laws of the orders of events in streams of `/v1/messages` and `/v1/responses`, each with its number.

`check_messages` and `check_responses` check them all. A law is a function of all events of one stream, which fails by
an assertion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Event = dict[str, Any]
Law = Callable[[Sequence[Event]], None]


def events_of(stream: str) -> list[Event]:
    """The events of a stream, comments left out; the name of each is its type."""
    events = list[Event]()
    for block in stream.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name, data = lines
        assert name.startswith("event: ") and data.startswith("data: "), block
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: "), "a name differs from its type"
        events.append(event)
    return events


def _kinds(events: Sequence[Event]) -> list[str]:
    return [event["type"] for event in events]


def m1(events: Sequence[Event]) -> None:
    """M1. The first event is the only message_start; its message is empty. An error may come instead."""
    kinds = _kinds(events)
    if kinds != ["error"]:
        assert kinds[0] == "message_start" and kinds.count("message_start") == 1, kinds
        message = events[0]["message"]
        assert message["content"] == [] and message["stop_reason"] is None and message["stop_sequence"] is None


def m2(events: Sequence[Event]) -> None:
    """M2. The last event is message_stop or error; there is one of them in all."""
    kinds = _kinds(events)
    assert kinds[-1] in ("message_stop", "error"), kinds
    assert kinds.count("message_stop") + kinds.count("error") == 1, kinds


def m3(events: Sequence[Event]) -> None:
    """M3. One message_delta comes, directly before message_stop."""
    kinds = _kinds(events)
    assert [at for at, kind in enumerate(kinds) if kind == "message_delta"] == (
        [len(kinds) - 2] if kinds[-1] == "message_stop" else []
    ), kinds


def m4(events: Sequence[Event]) -> None:
    """M4. Blocks come one after the other, numbered from 0; deltas are of the open one; none is open at the end."""
    begun, is_open = 0, False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == begun, event
                begun, is_open = begun + 1, True
            case "content_block_delta":
                assert is_open and event["index"] == begun - 1, event
            case "content_block_stop":
                assert is_open and event["index"] == begun - 1, event
                is_open = False
            case "message_delta":
                assert not is_open


_DELTAS = {"text": {"text_delta"}, "thinking": {"thinking_delta", "signature_delta"}, "tool_use": {"input_json_delta"}}
_BEGUN = {"text": ("text", ""), "thinking": ("thinking", ""), "tool_use": ("input", {})}


def m5(events: Sequence[Event]) -> None:
    """M5. A block begins empty, and its deltas are of its kind."""
    kind = ""
    for event in events:
        if event["type"] == "content_block_start":
            kind = event["content_block"]["type"]
            name, empty = _BEGUN[kind]
            assert event["content_block"][name] == empty, event
        elif event["type"] == "content_block_delta":
            assert event["delta"]["type"] in _DELTAS[kind], event


def m6(events: Sequence[Event]) -> None:
    """M6. The signature of a thinking block is its last delta; only a stream that failed may lack it."""
    for kind, deltas, closed in _blocks(events):
        if kind == "thinking":
            kinds = [delta["type"] for delta in deltas]
            assert kinds.count("signature_delta") == closed and (not closed or kinds[-1] == "signature_delta"), kinds


def m7(events: Sequence[Event]) -> None:
    """M7. Ids of calls differ; what a call is given is a JSON object unless the message was cut off."""
    ids = [event["content_block"]["id"] for event in events if "id" in event.get("content_block", {})]
    assert len(set(ids)) == len(ids), ids
    if _kinds(events)[-1] == "error" or _end(events)["delta"]["stop_reason"] != "tool_use":
        return
    for kind, deltas, _ in _blocks(events):
        if kind == "tool_use":
            given = "".join(delta["partial_json"] for delta in deltas)
            assert not given or isinstance(json.loads(given), dict), given


def m8(events: Sequence[Event]) -> None:
    """M8. stop_reason says tool_use only after a call, and stop_sequence is told where it is the reason, and nowhere
    else."""
    if _kinds(events)[-1] == "error":
        return
    told = _end(events)["delta"]
    kinds = [kind for kind, _, _ in _blocks(events)]
    assert told["stop_reason"] != "tool_use" or "tool_use" in kinds, told
    assert (told["stop_sequence"] is None) == (told["stop_reason"] != "stop_sequence"), told
    usage = _end(events)["usage"]
    assert 0 <= usage["output_tokens_details"]["thinking_tokens"] <= usage["output_tokens"], usage


def _end(events: Sequence[Event]) -> Event:
    return next(event for event in events if event["type"] == "message_delta")


def _blocks(events: Sequence[Event]) -> list[tuple[str, list[Event], bool]]:
    """Kind and deltas of each block, and whether it was closed."""
    blocks = list[tuple[str, list[Event], bool]]()
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append((event["content_block"]["type"], [], False))
        elif event["type"] == "content_block_delta":
            blocks[event["index"]][1].append(event["delta"])
        elif event["type"] == "content_block_stop":
            kind, deltas, _ = blocks[event["index"]]
            blocks[event["index"]] = (kind, deltas, True)
    return blocks


MESSAGE_LAWS: tuple[Law, ...] = (m1, m2, m3, m4, m5, m6, m7, m8)


def check_messages(events: Sequence[Event]) -> None:
    for law in MESSAGE_LAWS:
        law(events)
