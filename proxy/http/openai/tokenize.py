"""`POST /tokenize` and `POST /detokenize`: they serve no sequence, and wait for those that do."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Struct

from aegis.models.text.text_model import TextModel
from aegis.models.text.worker_messages import Rendered
from proxy.http.client_disconnect import while_connected
from proxy.http.fields import Fields
from proxy.http.market import Served
from proxy.http.openai.chat import needs_chat_template, read_conversation, read_generation
from proxy.http.openai.models import find_servable
from proxy.http.replies import json_reply
from proxy.http.request.body import read_fields
from proxy.http.request.prompts import PROMPT_TOKENS_MAX, needs_tokenizer
from proxy.http.request.sampling import checked_token_ids
from proxy.http.request.text_workers import characters_of
from proxy.http.request.worker_thread import beside_loop
from proxy.http.security.admission import admitted, who
from proxy.http.security.large_bodies import SMALL_BYTES
from proxy.http.settings import market_of, settings_of, texts_of
from proxy.http.structured.tools import read_tools

BYTES_MAX = 1 << 20
"""Of a body, here: longer texts have no use but work."""

router = APIRouter()


class Tokenized(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: msgspec.Raw


class Detokenized(Struct, frozen=True):
    prompt: str


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """`prompt` or `messages` as token ids, just as a completion would begin."""
    settings = settings_of(request)
    fields = await read_fields(request, min(settings.body_bytes_max, BYTES_MAX))
    served = find_servable(market_of(request), fields)
    text = needs_tokenizer(served, "model")
    special = fields.flag("add_special_tokens", True)
    prompt = fields.text("prompt", None, most_characters=BYTES_MAX)
    if prompt is None and not fields.given("messages"):
        raise fields.refusal("prompt", "is required, or 'messages'")
    if prompt is not None and fields.given("messages"):
        raise fields.refusal("messages", "and 'prompt' are both given: send one of them")
    async with admitted(request, served):
        if prompt is None:
            prompt, special = await _rendered(request, fields, served, text), False
        fields.end()
        counting = texts_of(request).count(who(request), text, prompt, special=special)
        counted = await while_connected(request.receive, counting)
    tokens = msgspec.Raw(counted.tokens_json)
    return json_reply(Tokenized(counted.count, served.spec.manifest.context_tokens, tokens))


async def _rendered(request: Request, fields: Fields, served: Served, text: TextModel) -> str:
    needs_chat_template(served)

    def read() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return read_conversation(fields, read_tools(fields, text))

    messages, variables = await beside_loop(read, fields.nbytes, few=SMALL_BYTES)
    rendering = texts_of(request).render(
        who(request),
        text,
        messages,
        variables,
        size=characters_of(messages) + characters_of(list(variables.values())),
        add_generation_prompt=read_generation(fields),
        characters_max=BYTES_MAX,
        tokens_max=0,
        aside=True,
    )
    rendered = await while_connected(request.receive, rendering)
    if not isinstance(rendered, Rendered):
        raise fields.refusal("messages", f"become {rendered.count} characters, at most {BYTES_MAX} are tokenized here")
    return rendered.text


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of `tokens`."""
    fields = await read_fields(request, min(settings_of(request).body_bytes_max, BYTES_MAX))
    served = find_servable(market_of(request), fields)
    text = needs_tokenizer(served, "model")
    if not fields.given("tokens"):
        raise fields.refusal("tokens", "is required")
    tokens = fields.items("tokens", most=PROMPT_TOKENS_MAX)
    fields.end()
    async with admitted(request, served):
        checked = await beside_loop(lambda: checked_token_ids(fields, "tokens", tokens, served.spec), len(tokens))
        decoding = texts_of(request).decode(who(request), text, checked)
        return json_reply(Detokenized(await while_connected(request.receive, decoding)))
