"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from time import time
from typing import Any

from fastapi import Request, Response
from msgspec import structs

from aegis.core.errors import UserError
from aegis.models.text import TextModel
from aegis.models.text_messages import Rendered, TooManyCharacters, TooManyTokens
from proxy.http.admission import Admitted, admitted, who
from proxy.http.answer import answer
from proxy.http.beside_loop import beside_loop
from proxy.http.body import read_fields
from proxy.http.boundary import Served
from proxy.http.chat_reader import Reading
from proxy.http.chat_shape import ChatShape
from proxy.http.choice import Order
from proxy.http.connection import while_connected
from proxy.http.fields import Fields
from proxy.http.held import held
from proxy.http.large_bodies import SMALL_BYTES
from proxy.http.messages import read_messages
from proxy.http.models import find_servable
from proxy.http.plain import plain_router
from proxy.http.prompts import (
    characters_max,
    known,
    max_tokens_for,
    needs_tokenizer,
    tokens_max,
    too_many_characters,
    too_many_tokens,
)
from proxy.http.reasoning import marks_of
from proxy.http.request_ids import request_id_for
from proxy.http.sampling import LOGPROBS_MAX, Wish, held_to, read_max_tokens, read_wish
from proxy.http.settings import market_of, settings_of, texts_of
from proxy.http.structured import check_grammar
from proxy.http.texts import characters_of
from proxy.http.tools import Tools, read_tools

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "store": (False,),
    "verbosity": (),
    "web_search_options": (),
}
_NOT_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "self",
        "tools",
    }
)

router = plain_router()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    fields = await read_fields(request, settings_of(request).body_bytes_max)
    return await held(request, fields, lambda: _converse(request, fields))


async def _converse(request: Request, fields: Fields) -> Response:
    served = find_servable(market_of(request), fields)
    text = needs_chat_template(served)
    fields.elsewhere("prompt", "send 'messages' here, or 'prompt' to /v1/completions")
    logprobs = _read_logprobs(fields)
    max_tokens = _read_max_tokens(fields)
    wish = await beside_loop(
        lambda: read_wish(fields, served, max_tokens=max_tokens, logprobs=logprobs), fields.nbytes, few=SMALL_BYTES
    )
    for name, neutral in _UNSUPPORTED.items():
        fields.unsupported(name, neutral)
    async with admitted(request, served) as admission:
        return await _generate(request, fields, served, text, wish, admission, logprobs=logprobs is not None)


async def _generate(
    request: Request,
    fields: Fields,
    served: Served,
    text: TextModel,
    wish: Wish,
    admission: Admitted,
    *,
    logprobs: bool,
) -> Response:
    tools = await beside_loop(lambda: read_tools(fields, text), fields.nbytes, few=SMALL_BYTES)
    rendered, tokens = await render(request, fields, served, text, tools)
    fields.end()
    if wanted := tools.held_to() if tools else None:
        if wish.held_to:
            raise fields.refusal("tool_choice", f"and {wish.held_to.param!r} cannot be had together")
        wish = structs.replace(wish, held_to=wanted, sampling=held_to(fields, wish.sampling, wanted))
    grammar = wish.sampling.grammar
    free = grammar is None or grammar.kind == "structural_tag"  # that has room for reasoning
    marks = marks_of(text.chat_template or "") if free else None
    reading = Reading(rendered, marks, tools)
    wish = structs.replace(wish, shown=reading.markers)
    prompt = known(fields, "messages", tokens, served.spec)
    if not prompt:
        raise fields.refusal("messages", "make an empty prompt")
    if wish.held_to:
        await check_grammar(request, served, wish.held_to)
    order = Order(prompt, max_tokens_for(served, len(prompt), wish, default=None, param="messages"))
    shape = ChatShape(
        id=f"chatcmpl-{request_id_for(request, wish.request_id)}",
        created_s=int(time()),
        model=served.spec.model,
        text=text,
        reading=reading,
        logprobs=logprobs,
        token_ids=wish.return_token_ids,
        include_usage=wish.include_usage,
    )
    return await answer(request, served, [order], wish, shape, admission)


def needs_chat_template(served: Served) -> TextModel:
    """Raises UserError where the model has none."""
    text = needs_tokenizer(served, "model")
    if text.chat_template is None:
        message = f"model {served.spec.model!r} has no chat template: send its prompt to /v1/completions"
        raise UserError(message, param="model", code="no_chat_template")
    return text


async def render(
    request: Request, fields: Fields, served: Served, text: TextModel, tools: Tools | None
) -> tuple[str, tuple[int, ...]]:
    """The prompt that `messages` make, and its tokens. Raises UserError; ClientGone where nobody waits any more."""
    messages, variables = await beside_loop(lambda: read_conversation(fields, tools), fields.nbytes, few=SMALL_BYTES)
    size = characters_of(messages) + characters_of(list(variables.values()))
    rendering = texts_of(request).render(
        who(request),
        text,
        messages,
        variables,
        size=size,
        add_generation_prompt=read_generation(fields),
        characters_max=characters_max(served.spec, text),
        tokens_max=tokens_max(served.spec),
        watch=partial(while_connected, request.receive),
    )
    match await rendering:
        case Rendered(rendered, tokens):
            return rendered, tokens
        case TooManyTokens(count):
            raise too_many_tokens("messages", count, served.spec)
        case TooManyCharacters(count):
            raise too_many_characters("messages", count, served.spec)


def read_conversation(fields: Fields, tools: Tools | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """`messages`, and the variables of the template. Raises UserError."""
    messages = read_messages(fields)
    variables = fields.mapping("chat_template_kwargs") or {}
    for name in _NOT_VARIABLES & variables.keys():
        raise fields.refusal("chat_template_kwargs", f"may not set {name!r}")
    fields.unsupported("continue_final_message", (False,))
    return messages, {**variables, "tools": list(tools.definitions)} if tools else variables


def read_generation(fields: Fields) -> bool:
    return fields.flag("add_generation_prompt", True)


def _read_max_tokens(fields: Fields) -> int | None:
    """`max_completion_tokens` is the newer name; both may be given if they agree."""
    older, newer = read_max_tokens(fields, "max_tokens"), read_max_tokens(fields, "max_completion_tokens")
    if older is not None and newer is not None and older != newer:
        raise fields.refusal("max_completion_tokens", f"({newer}) and 'max_tokens' ({older}) differ: send one of them")
    return newer if newer is not None else older


def _read_logprobs(fields: Fields) -> int | None:
    """How many alternatives to report per token; None for no logprobs at all."""
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, low=0, high=LOGPROBS_MAX)
    if top is not None and not wanted:
        raise fields.refusal("top_logprobs", "needs 'logprobs': true")
    return (top or 0) if wanted else None
