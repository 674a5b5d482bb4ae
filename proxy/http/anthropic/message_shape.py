"""The wording of replies of `/v1/messages`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import cast

from msgspec import Raw, Struct

from aegis.core.errors import UserError
from aegis.core.request import FinishReason
from proxy.http.anthropic.message_events import (
    Block,
    Message,
    MessageDelta,
    MessageEvent,
    MessageEvents,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputDetails,
    Stop,
    blocks_of,
)
from proxy.http.anthropic_errors import anthropic_error
from proxy.http.openai.chat import Conversation
from proxy.http.openai.chat_reader import ChatReader
from proxy.http.openai.choices import Usage
from proxy.http.streaming.event_stream import named_event, tagged_events
from proxy.http.streaming.transcript import Piece
from proxy.http.structured.tool_calls import MISTRAL


class MessageShape:
    """A `reply_shape.Shape` of one choice."""

    def __init__(self, asked: Conversation) -> None:
        self._asked = asked
        self._id = f"msg_{asked.request_id}"
        self._reader = ChatReader(asked.reading)
        tools = asked.reading.tools
        mistral = bool(tools and tools.form is MISTRAL)
        # of no method: in a cycle all of a request would wait to be collected
        self._events = MessageEvents(partial(_call_id, self._id, mistral=mistral))
        self._last = Piece()

    def begun(self) -> bytes:
        """How much of the prompt was kept from before is not known yet: the counts of the end replace these."""
        usage = MessageUsage(len(self._asked.prompt), 0, OutputDetails(0))
        return tagged_events([MessageStart(self._message([], None, None, usage))])

    def told(self, index: int, piece: Piece) -> bytes:
        return tagged_events(self._take(piece))

    def ended(self, usage: Usage) -> bytes:
        delta = MessageDelta(Stop(self._stop_reason(usage), self._last.stop), self._usage(usage))
        return tagged_events([*self._events.close(), delta, MessageStop()])

    def failed(self, error: UserError) -> bytes:
        return failure(error, self._asked.request_id)

    def choice(self, index: int, piece: Piece) -> Sequence[Struct]:
        return blocks_of([*self._take(piece), *self._events.close()])

    def whole(self, choices: Sequence[Raw], usage: Usage) -> Message:
        (content,) = choices
        told = cast("list[Block]", content)
        return self._message(told, self._stop_reason(usage), self._last.stop, self._usage(usage))

    async def kept(self) -> None:
        pass

    def closed(self) -> None:
        pass

    @property
    def stop(self) -> asyncio.Event | None:
        return None

    def _take(self, piece: Piece) -> list[MessageEvent]:
        self._last = piece
        return self._events.take(self._reader.read(piece))

    def _message(self, content: list[Block], reason: str | None, stop: str | None, usage: MessageUsage) -> Message:
        return Message(self._id, self._asked.served.spec.model, content, reason, stop, usage)

    def _stop_reason(self, usage: Usage) -> str:
        if self._last.stop is not None:
            return "stop_sequence"
        if self._last.finish == FinishReason.LENGTH:
            wanted = self._asked.parameters.max_tokens or 0
            return "max_tokens" if usage.completion_tokens >= wanted else "model_context_window_exceeded"
        return "tool_use" if self._reader.called else "end_turn"

    def _usage(self, usage: Usage) -> MessageUsage:
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            usage.prompt_tokens - cached,
            usage.completion_tokens,
            OutputDetails(self._reader.reasoning_tokens),
            cache_read_input_tokens=cached,
        )


def _call_id(message_id: str, call: int, *, mistral: bool) -> str:
    """An id that is the same when the request is retried. Mistral's templates take ids of nine characters only."""
    digest = blake2b(f"{message_id} {call}".encode(), digest_size=12).hexdigest()
    return digest[:9] if mistral else f"toolu_{digest}"


def failure(error: UserError, request_id: str) -> bytes:
    """The last event of a stream."""
    return named_event("error", anthropic_error(error, request_id))
