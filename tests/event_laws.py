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


_LAST = ("response.completed", "response.incomplete", "response.failed")
_FIRST = ["response.created", "response.in_progress"]
_CONTENT = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
}


def r1(events: Sequence[Event]) -> None:
    """R1. Sequence numbers count the events from 0."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def r2(events: Sequence[Event]) -> None:
    """R2. The first two events, and no others, say that the response is created and in progress, with nothing of it."""
    kinds = _kinds(events)
    assert kinds[:2] == _FIRST and not set(_FIRST) & set(kinds[2:]), kinds
    for event in events[:2]:
        told = event["response"]
        assert (told["status"], told["output"], told["usage"]) == ("in_progress", [], None), told


def r3(events: Sequence[Event]) -> None:
    """R3. The last event, and no other, says how the response ended, and its status says the same."""
    kinds = _kinds(events)
    assert kinds[-1] in _LAST and not set(_LAST) & set(kinds[:-1]), kinds
    status = events[-1]["response"]["status"]
    assert kinds[-1] == f"response.{'incomplete' if status == 'cancelled' else status}", status


def r4(events: Sequence[Event]) -> None:
    """R4. Items come one after the other, numbered from 0; each that is added is done, as the same item."""
    begun, item = 0, None
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert item is None and event["output_index"] == begun, event
                assert event["item"]["status"] == "in_progress"
                begun, item = begun + 1, event["item"]
            case "response.output_item.done":
                assert item is not None and event["output_index"] == begun - 1, event
                same = ("id", "type", "call_id", "name", "role")
                assert [item.get(name) for name in same] == [event["item"].get(name) for name in same], event
                item = None
    assert item is None, "an item is open at the end"


def r5(events: Sequence[Event]) -> None:
    """R5. What is told within an item has its id, its place, and the one place of its content."""
    item, index = None, -1
    for event in events:
        if event["type"] == "response.output_item.added":
            item, index = event["item"], event["output_index"]
        elif event["type"] == "response.output_item.done":
            item = None
        elif "item_id" in event:
            assert item is not None and (event["item_id"], event["output_index"]) == (item["id"], index), event
            assert event.get("content_index", 0) == 0, event


def r6(events: Sequence[Event]) -> None:
    """R6. Within an item come the beginning of its content, its deltas, and the ends of both."""
    for item in _items(events):
        kind = item[0]["item"]["type"]
        name, _ = _CONTENT[kind]
        part = [] if kind == "function_call" else ["response.content_part.added"]
        done = [f"{name}.done", *(["response.content_part.done"] if part else []), "response.output_item.done"]
        deltas = [f"{name}.delta"] * (len(item) - 1 - len(part) - len(done))
        assert _kinds(item) == ["response.output_item.added", *part, *deltas, *done], _kinds(item)


def r7(events: Sequence[Event]) -> None:
    """R7. The deltas of an item are the text of its end, of its part and of the item as it is done; so are their
    logprobs."""
    for item in _items(events):
        kind = item[0]["item"]["type"]
        name, value = _CONTENT[kind]
        text = "".join(event["delta"] for event in item if event["type"] == f"{name}.delta")
        assert [event[value] for event in item if event["type"] == f"{name}.done"] == [text]
        done = item[-1]["item"]
        if kind == "function_call":
            assert done["arguments"] == text
            continue
        assert [part["text"] for part in done["content"]] == [text]
        assert [event["part"] for event in item if event["type"] == "response.content_part.done"] == done["content"]
        scores = [each for event in item if event["type"] == f"{name}.delta" for each in event.get("logprobs", ())]
        assert done["content"][0].get("logprobs", []) == scores
        assert [event.get("logprobs", []) for event in item if event["type"] == f"{name}.done"] == [scores]


def r8(events: Sequence[Event]) -> None:
    """R8. The output of the response as it ended is its items as they were done; all ids differ."""
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    for name in ("id", "call_id"):
        ids = [item[name] for item in done if name in item]
        assert len(set(ids)) == len(ids), ids


def r9(events: Sequence[Event]) -> None:
    """R9. Nothing but what grows changes of the response; only the last item of one that was cut off is incomplete."""
    told = [event["response"] for event in events if "response" in event]
    grows = {"status", "output", "usage", "error", "incomplete_details", "completed_at"}
    for later in told[1:]:
        assert later.keys() == told[0].keys()
        assert {name for name, value in later.items() if value != told[0][name]} <= grows, later
    statuses = [item["status"] for item in told[-1]["output"]]
    assert set(statuses[:-1]) <= {"completed"}, statuses
    assert told[-1]["status"] != "completed" or set(statuses) <= {"completed"}, statuses


def r10(events: Sequence[Event]) -> None:
    """R10. A response that did not fail has its usage, which adds up; one that did has its error."""
    told = events[-1]["response"]
    if told["status"] == "failed":
        assert told["error"]["message"] and told["error"]["code"]
        return
    assert told["error"] is None
    usage = told["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"], usage
    assert 0 <= usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"], usage
    assert 0 <= usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"], usage


def _items(events: Sequence[Event]) -> list[list[Event]]:
    """The events of each item."""
    items = list[list[Event]]()
    for event in events:
        if event["type"] == "response.output_item.added":
            items.append([])
        if "output_index" in event:
            items[-1].append(event)
    return items


RESPONSE_LAWS: tuple[Law, ...] = (r1, r2, r3, r4, r5, r6, r7, r8, r9, r10)


def check_responses(events: Sequence[Event]) -> None:
    for law in RESPONSE_LAWS:
        law(events)
