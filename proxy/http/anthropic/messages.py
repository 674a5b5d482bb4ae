"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from functools import partial

from fastapi import Request, Response
from msgspec import Struct

from proxy.http.anthropic.message_body import MessageBody, TokensBody, chat_request, conversation_request
from proxy.http.anthropic.message_events import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
)
from proxy.http.anthropic.message_shape import MessageShape, failure
from proxy.http.anthropic_errors import AnthropicErrorBody
from proxy.http.direct_routes import direct_router
from proxy.http.ignored import Ignored
from proxy.http.market import Served
from proxy.http.openai.chat import ChatBody, converse, needs_chat_template
from proxy.http.openai.held_requests import found, held
from proxy.http.openai.models import find_servable
from proxy.http.openai.tokenize import BYTES_MAX, TokenizeBody, conversation_tokens
from proxy.http.openapi import ASKING, EVENTS, operation
from proxy.http.replies import json_reply
from proxy.http.request.body import read_body
from proxy.http.request.worker_thread import beside_loop
from proxy.http.request_ids import id_of
from proxy.http.security.admission import admitted
from proxy.http.security.large_bodies import SMALL_BYTES
from proxy.http.settings import market_of, settings_of

_NAMES = {
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
    "tool_choice.function": "tool_choice",
    ".parameters": ".input_schema",
}
"""Parameters of chat by their names here."""

_HEADERS = (
    {"name": "beta", "in": "query", "required": False, "schema": {"type": "boolean"}},
    {"name": "anthropic-version", "in": "header", "required": False, "schema": {"type": "string"}},
    {"name": "anthropic-beta", "in": "header", "required": False, "schema": {"type": "string"}},
)

router = direct_router()


class TokenCount(Struct, frozen=True):
    input_tokens: int


@router.post(
    "/v1/messages",
    **operation(
        "Answer a conversation, as Anthropic's API does",
        Message,
        MessageStart,
        BlockStart,
        BlockDelta,
        BlockStop,
        MessageDelta,
        MessageStop,
        takes=MessageBody,
        kinds=(EVENTS,),
        problems=ASKING,
        parameters=_HEADERS,
        error=AnthropicErrorBody,
    ),
)
async def create_message(request: Request) -> Response:
    body = await read_body(request, MessageBody, settings_of(request).body_bytes_max)
    ignored = Ignored()
    failed = partial(failure, request_id=id_of(request.scope))
    return ignored.tell(request, await held(request, body, lambda: _answer(request, body, ignored), failed))


async def _answer(request: Request, body: MessageBody, ignored: Ignored) -> Response:
    text = needs_chat_template(find_servable(market_of(request), body))
    chat = await beside_loop(lambda: chat_request(body, text, ignored), body.nbytes, few=SMALL_BYTES)
    _end(request, body, ignored)
    with chat.renamed(_NAMES):
        return await converse(request, ChatBody(chat.values, nbytes=body.nbytes), MessageShape, cuts=True)


@router.post(
    "/v1/messages/count_tokens",
    **operation(
        "The tokens of a conversation",
        TokenCount,
        takes=TokensBody,
        problems=ASKING,
        parameters=_HEADERS,
        error=AnthropicErrorBody,
    ),
)
async def count_tokens(request: Request) -> Response:
    body = await read_body(request, TokensBody, min(settings_of(request).body_bytes_max, BYTES_MAX))
    ignored = Ignored()
    served = await found(request, body)
    return ignored.tell(request, json_reply(TokenCount(await _count(request, body, served, ignored))))


async def _count(request: Request, body: TokensBody, served: Served, ignored: Ignored) -> int:
    text = needs_chat_template(served)
    chat = await beside_loop(lambda: conversation_request(body, text, ignored), body.nbytes, few=SMALL_BYTES)
    _end(request, body, ignored)
    async with admitted(request, served):
        with chat.renamed(_NAMES):
            conversation = TokenizeBody(chat.values, nbytes=body.nbytes)
            return (await conversation_tokens(request, conversation, served, text)).count


def _end(request: Request, body: TokensBody, ignored: Ignored) -> None:
    """Raises UserError for an unknown parameter, unless the client announces parameters of betas."""
    if "beta" in request.query_params or "anthropic-beta" in request.headers:
        for name in body.unknown():
            ignored.add(name)
    else:
        body.end()
