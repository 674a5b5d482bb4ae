"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec import Struct

from proxy.http.body import read_fields
from proxy.http.chat import needs_chat_template, render
from proxy.http.models import find_servable
from proxy.http.prompts import PROMPT_TOKENS_MAX, beside_loop, encode, needs_tokenizer
from proxy.http.replies import json_reply
from proxy.http.sampling import checked_token_ids
from proxy.http.settings import market_of, settings_of
from proxy.http.tools import read_tools

router = APIRouter()


class Tokenized(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]


class Detokenized(Struct, frozen=True):
    prompt: str


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """`prompt` or `messages` as token ids, just as a completion would begin."""
    settings = settings_of(request)
    fields = await read_fields(request, settings.body_bytes_max)
    served = find_servable(market_of(request), fields)
    text = needs_tokenizer(served, "model")
    special = fields.flag("add_special_tokens", True)
    prompt = fields.text("prompt", None, most_characters=settings.body_bytes_max)
    if prompt is None and not fields.given("messages"):
        raise fields.refusal("prompt", "is required, or 'messages'")
    if prompt is not None and fields.given("messages"):
        raise fields.refusal("messages", "and 'prompt' are both given: send one of them")
    if prompt is None:
        needs_chat_template(served)
        tools = read_tools(fields, text)
        prompt, special = await render(fields, text, tools), False
    fields.end()
    tokens = await encode(text, prompt, special=special)
    return json_reply(Tokenized(len(tokens), served.spec.manifest.context_tokens, tokens))


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of `tokens`."""
    fields = await read_fields(request, settings_of(request).body_bytes_max)
    served = find_servable(market_of(request), fields)
    text = needs_tokenizer(served, "model")
    if not fields.given("tokens"):
        raise fields.refusal("tokens", "is required")
    tokens = fields.items("tokens", most=PROMPT_TOKENS_MAX)
    fields.end()

    def decoded() -> str:
        return text.decode(checked_token_ids(fields, "tokens", tokens, served.spec))

    return json_reply(Detokenized(await beside_loop(decoded, len(tokens))))
