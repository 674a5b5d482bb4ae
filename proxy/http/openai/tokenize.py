"""`POST /tokenize` and `POST /detokenize`: they serve no sequence, and wait for those that do."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Struct

from aegis.models.text.text_model import TextModel
from aegis.models.text.worker_messages import Counted, Rendered
from proxy.http.client_disconnect import while_connected
from proxy.http.market import Served
from proxy.http.openai.chat import ConversationBody, needs_chat_template, read_conversation
from proxy.http.openai.held_requests import found
from proxy.http.openai.models import longest
from proxy.http.openapi import ASKING, operation
from proxy.http.parameters import Items, Text, required
from proxy.http.replies import json_reply
from proxy.http.request.body import ModelBody, read_body
from proxy.http.request.messages import Messages
from proxy.http.request.prompts import PROMPT_TOKENS_MAX, SpecialTokensBody, needs_tokenizer
from proxy.http.request.sampling import TOKEN_ID, checked_token_ids
from proxy.http.request.text_workers import characters_of
from proxy.http.request.worker_thread import beside_loop
from proxy.http.security.admission import admitted, who
from proxy.http.security.large_bodies import SMALL_BYTES
from proxy.http.settings import settings_of, texts_of
from proxy.http.structured.tools import read_tools

BYTES_MAX = 1 << 20
"""Of a body, here: longer texts have no use but work."""

router = APIRouter()


class TextBody(ModelBody, SpecialTokensBody):
    """A prompt. `messages` is known here too, because its error differs from that of an unknown parameter."""

    prompt = Text(None, most_characters=BYTES_MAX)
    messages = Messages(required=False)


class TokenizeBody(TextBody, ConversationBody):
    """A prompt, or a conversation."""


class DetokenizeBody(ModelBody):
    tokens = required(Items(TOKEN_ID, most=PROMPT_TOKENS_MAX))


class Tokenized(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: msgspec.Raw


class Detokenized(Struct, frozen=True):
    prompt: str


@router.post("/tokenize", **operation("Text as token ids", Tokenized, takes=TokenizeBody, problems=ASKING))
async def tokenize(request: Request) -> Response:
    """`prompt` or `messages` as token ids, just as a completion would begin."""
    settings = settings_of(request)
    body = await read_body(request, TokenizeBody, min(settings.body_bytes_max, BYTES_MAX))
    served = await found(request, body, None)
    text = needs_tokenizer(served, "model")
    special, prompt = body.add_special_tokens, body.prompt
    if prompt is None and not body.given("messages"):
        raise body.invalid("prompt", "is required, or 'messages'")
    if prompt is not None and body.given("messages"):
        raise body.invalid("messages", "and 'prompt' are both given: send one of them")
    async with admitted(request, served):
        if prompt is None:
            counted = await conversation_tokens(request, body, served, text)
            body.end()
        else:
            body.end(TextBody)
            counted = await _counted(request, text, prompt, special=special)
    tokens = msgspec.Raw(counted.tokens_json)
    return json_reply(Tokenized(counted.count, longest(served), tokens))


async def conversation_tokens(request: Request, body: TokenizeBody, served: Served, text: TextModel) -> Counted:
    """The tokens of `messages`, as a completion would begin. Raises UserError; ClientGone if the client has left."""
    rendered = await _rendered(request, body, served, text)
    return await _counted(request, text, rendered, special=False)


async def _counted(request: Request, text: TextModel, prompt: str, *, special: bool) -> Counted:
    counting = texts_of(request).count(who(request), text, prompt, special=special)
    return await while_connected(request.receive, counting)


async def _rendered(request: Request, body: TokenizeBody, served: Served, text: TextModel) -> str:
    needs_chat_template(served)

    def read() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return read_conversation(body, text, read_tools(body, text))

    messages, variables = await beside_loop(read, body.nbytes, few=SMALL_BYTES)
    rendering = texts_of(request).render(
        who(request),
        text,
        messages,
        variables,
        size=characters_of(messages) + characters_of(list(variables.values())),
        add_generation_prompt=body.add_generation_prompt,
        characters_max=BYTES_MAX,
        tokens_max=0,
        aside=True,
    )
    rendered = await while_connected(request.receive, rendering)
    if not isinstance(rendered, Rendered):
        raise body.invalid("messages", f"become {rendered.count} characters, at most {BYTES_MAX} are tokenized here")
    return rendered.text


@router.post("/detokenize", **operation("Token ids as text", Detokenized, takes=DetokenizeBody, problems=ASKING))
async def detokenize(request: Request) -> Response:
    """The text of `tokens`."""
    body = await read_body(request, DetokenizeBody, min(settings_of(request).body_bytes_max, BYTES_MAX))
    served = await found(request, body, None)
    text = needs_tokenizer(served, "model")
    tokens = body.tokens
    body.end()
    async with admitted(request, served):
        checked = await beside_loop(lambda: checked_token_ids(body, "tokens", tokens, served.spec), len(tokens))
        decoding = texts_of(request).decode(who(request), text, checked)
        return json_reply(Detokenized(await while_connected(request.receive, decoding)))
