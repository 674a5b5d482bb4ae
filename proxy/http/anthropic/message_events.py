"""From the parts of a reply to the events of Anthropic's streams, and to the content of a message: the same blocks.

The order of events, which `tests/event_laws.py` states as laws: `message_start`; each block's `content_block_start`,
deltas and `content_block_stop`, one block after the other; `message_delta`; `message_stop`. An error ends the stream
wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct, field

from proxy.http.streaming.reply_parts import CallArguments, CallBegun, Part, ReasoningPart, TextPart


class TextBlock(Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    """`signature` is of the text alone: what comes back is not checked."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)


Block = TextBlock | ThinkingBlock | ToolUseBlock


class OutputDetails(Struct, frozen=True):
    """`thinking_tokens`: with the marks around them."""

    thinking_tokens: int


class MessageUsage(Struct, frozen=True):
    """`input_tokens` are those that were prefilled, `cache_read_input_tokens` those whose KV was kept from before."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class Message(Struct, frozen=True, tag="message"):
    id: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    role: str = "assistant"


class MessageStart(Struct, frozen=True, tag="message_start"):
    message: Message


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputDelta(Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    index: int


class Stop(Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag="message_delta"):
    delta: Stop
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag="message_stop"):
    """Nothing follows."""


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class MessageEvents:
    """The events between the first and the last two, from the parts of a reply. `call_id` is the id of the reply's call
    number so and so."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self._call_id = call_id
        self._index = -1  # of the last block that was begun
        self._kind: type[Part] | None = None  # of the open block
        self._thought = blake2b(digest_size=16)

    def take(self, parts: Iterable[Part]) -> list[MessageEvent]:
        return [event for part in parts for event in self._take(part)]

    def close(self) -> list[MessageEvent]:
        """The reply has no further parts, or no further one of the block that is open."""
        if self._kind is None:
            return []
        events: list[MessageEvent] = []
        if self._kind is ReasoningPart:
            events.append(BlockDelta(self._index, SignatureDelta(self._thought.hexdigest())))
        self._kind = None
        return [*events, BlockStop(self._index)]

    def _take(self, part: Part) -> list[MessageEvent]:
        match part:
            case TextPart(text):
                return [*self._within(TextPart, TextBlock("")), BlockDelta(self._index, TextDelta(text))]
            case ReasoningPart(text):
                begun = self._within(ReasoningPart, ThinkingBlock("", ""))
                self._thought.update(text.encode(errors="replace"))
                return [*begun, BlockDelta(self._index, ThinkingDelta(text))]
            case CallBegun(call, name):
                return self._begin(CallBegun, ToolUseBlock(self._call_id(call), name))
            case CallArguments(_, text):
                return [BlockDelta(self._index, InputDelta(text))]

    def _within(self, kind: type[Part], block: Block) -> list[MessageEvent]:
        return [] if self._kind is kind else self._begin(kind, block)

    def _begin(self, kind: type[Part], block: Block) -> list[MessageEvent]:
        closed = self.close()
        self._index, self._kind = self._index + 1, kind
        self._thought = blake2b(digest_size=16)
        return [*closed, BlockStart(self._index, block)]


def blocks_of(events: Sequence[MessageEvent]) -> list[Block]:
    """The blocks that the events of a stream make up."""
    begun = [event.content_block for event in events if isinstance(event, BlockStart)]
    deltas: list[list[Any]] = [[] for _ in begun]
    for event in events:
        if isinstance(event, BlockDelta):
            deltas[event.index].append(event.delta)
    return [_block(block, of_block) for block, of_block in zip(begun, deltas, strict=True)]


def _block(begun: Block, deltas: Sequence[Any]) -> Block:
    match begun:
        case TextBlock():
            return TextBlock("".join(delta.text for delta in deltas))
        case ThinkingBlock():
            *thought, signature = deltas
            return ThinkingBlock("".join(delta.thinking for delta in thought), signature.signature)
        case ToolUseBlock(id, name):
            return ToolUseBlock(id, name, _input("".join(delta.partial_json for delta in deltas)))


def _input(text: str) -> dict[str, Any]:
    """The arguments of a call as an object: those of one that was cut off are none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}
