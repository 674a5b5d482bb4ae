"""The wording of replies of `/v1/responses`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import cast

from msgspec import Raw, Struct, structs

from aegis.core.errors import UserError
from aegis.core.request import FinishReason
from aegis.models.text.text_model import TextModel
from proxy.http.openai.chat import Conversation
from proxy.http.openai.chat_reader import ChatReader
from proxy.http.openai.chat_replies import token_logprob
from proxy.http.openai.choices import Usage
from proxy.http.responses.response_events import ResponseEvent, ResponseEvents
from proxy.http.responses.response_items import (
    Incomplete,
    InputDetails,
    Item,
    OutputDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    Status,
)
from proxy.http.responses.running_responses import RunningResponse
from proxy.http.streaming.event_stream import tagged_events
from proxy.http.streaming.reply_parts import TextPart
from proxy.http.streaming.transcript import Piece, Scored, by_token, tokens_of
from proxy.http.structured.tool_calls import MISTRAL


class Callbacks(Struct, frozen=True):
    """`begin` and `end` are called when a response runs, and when it is over; `keep` keeps it for later requests, if it
    is to be, and `now_s` is the date."""

    begin: Callable[[], RunningResponse]
    end: Callable[[RunningResponse, ResponseObject | None], None]
    keep: Callable[[ResponseObject], Awaitable[None]]
    now_s: Callable[[], float]


_ERRORS = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseShape:
    """A `reply_shape.Shape` of one choice."""

    def __init__(self, head: ResponseObject, callbacks: Callbacks, asked: Conversation) -> None:
        """`head` is the response as it begins."""
        self._head = structs.replace(head, model=asked.served.spec.model)
        self._callbacks = callbacks
        mistral = bool(asked.reading.tools and asked.reading.tools.form is MISTRAL)
        self._reader = ChatReader(asked.reading)
        names = partial(item_id, self._head), partial(_call_id, self._head, mistral=mistral)
        self._events = ResponseEvents(*names)  # of no method: in a cycle all of a request would wait to be collected
        self._text = asked.text if asked.logprobs else None
        self._sent = 0
        self._unsaid: list[Scored] = []  # tokens whose text is still to come
        self._finish: FinishReason | None = None
        self._final: ResponseObject | None = None
        self._running = callbacks.begin()

    @property
    def stop(self) -> asyncio.Event:
        return self._running.stop

    def begun(self) -> bytes:
        return tagged_events(self._events.begin(self._head))

    def told(self, index: int, piece: Piece) -> bytes:
        return tagged_events(self._take(piece))

    def ended(self, usage: Usage) -> bytes:
        closed = self._close()
        self._final = self._ended(usage)
        return tagged_events([*closed, *self._events.end(self._final)])

    def failed(self, error: UserError) -> bytes:
        return failure(self._events, self._head, error)

    def choice(self, index: int, piece: Piece) -> Sequence[Struct]:
        self._take(piece)
        self._close()
        return self._events.output

    def whole(self, choices: Sequence[Raw], usage: Usage) -> ResponseObject:
        self._final = self._ended(usage)
        (output,) = choices
        return structs.replace(self._final, output=cast("list[Item]", output))

    async def kept(self) -> None:
        """Who cancels it need not wait until its client has read the end."""
        if self._final:
            await self._callbacks.keep(self._final)
            self._callbacks.end(self._running, self._final)

    def closed(self) -> None:
        self._callbacks.end(self._running, self._final)

    def _take(self, piece: Piece) -> list[ResponseEvent]:
        self._finish = piece.finish
        if self._text is None:
            return self._events.take(self._reader.read(piece))
        events = [event for each in by_token(piece, self._sent) for event in self._take_scored(each, self._text)]
        self._sent += len(piece.text)
        return events

    def _take_scored(self, piece: Piece, text: TextModel) -> list[ResponseEvent]:
        """A piece of one token. Tokens of marks, of reasoning and of calls have no logprobs."""
        self._unsaid += piece.tokens
        parts, said = self._reader.read(piece), list[Scored]()
        for part in parts:
            if isinstance(part, TextPart):
                within, self._unsaid = tokens_of(part.text, self._unsaid, self._reader.held)
                said += within
            else:
                self._unsaid = []
        return self._events.take(parts, [token_logprob(text, scored) for scored in said])

    def _close(self) -> list[ResponseEvent]:
        return self._events.close("completed" if self._finish == FinishReason.STOP else "incomplete")

    def _ended(self, usage: Usage) -> ResponseObject:
        cut = self._finish == FinishReason.LENGTH
        ended: Status = "incomplete" if cut else "completed"
        if self._finish is None:
            ended = "cancelled"
        told = ResponseUsage(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputDetails(self._reader.reasoning_tokens),
            usage.total_tokens,
        )
        return structs.replace(
            self._head,
            status=ended,
            incomplete_details=Incomplete("max_output_tokens") if cut else None,
            completed_at=int(self._callbacks.now_s()) if ended == "completed" else None,
            output=self._events.output,
            usage=told,
        )


def item_id(head: ResponseObject, kind: str, index: int) -> str:
    return f"{kind}_{blake2b(f'{head.id} {kind} {index}'.encode(), digest_size=16).hexdigest()}"


def _call_id(head: ResponseObject, call: int, *, mistral: bool) -> str:
    """An id that is the same when the request is retried. Mistral's templates take ids of nine characters only."""
    name = item_id(head, "call", call)
    return name.removeprefix("call_")[:9] if mistral else name


def failure(events: ResponseEvents, head: ResponseObject, error: UserError) -> bytes:
    """The last events of a stream that cannot go on, of which nothing may have been told yet."""
    begun = [] if events.begun else events.begin(head)
    closed = events.close("incomplete")
    return tagged_events([*begun, *closed, *events.end(failed_response(head, error, events.output))])


def failed_response(head: ResponseObject, error: UserError, output: Sequence[Item] = ()) -> ResponseObject:
    told = ResponseError(_ERRORS.get(error.status, "server_error"), error.message)
    return structs.replace(head, status="failed", error=told, output=list(output))
