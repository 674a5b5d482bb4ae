"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from time import time

import msgspec
from fastapi import Request, Response
from msgspec import structs

from aegis.core.errors import UserError
from aegis.models.text import TextModel
from proxy.http.answer import answer
from proxy.http.body import read_fields
from proxy.http.boundary import Served
from proxy.http.chat_reader import Reading
from proxy.http.chat_shape import ChatShape
from proxy.http.choice import Order
from proxy.http.fields import Fields
from proxy.http.held import held
from proxy.http.messages import read_messages
from proxy.http.models import find_servable
from proxy.http.plain import plain_router
from proxy.http.prompts import beside_loop, check_characters, encode, known, max_tokens_for, needs_tokenizer
from proxy.http.reasoning import marks_of
from proxy.http.request_ids import request_id_for
from proxy.http.sampling import LOGPROBS_MAX, held_to, read_max_tokens, read_wish
from proxy.http.settings import market_of, settings_of
from proxy.http.structured import check_grammar
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
    wish = read_wish(fields, served, max_tokens=_read_max_tokens(fields), logprobs=logprobs)
    for name, neutral in _UNSUPPORTED.items():
        fields.unsupported(name, neutral)
    tools = read_tools(fields, text)
    rendered = await render(fields, text, tools)
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
    await beside_loop(lambda: check_characters("messages", len(rendered), served.spec, text), len(rendered))
    prompt = known(fields, "messages", await encode(text, rendered, special=False), served.spec)
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
        logprobs=logprobs is not None,
        token_ids=wish.return_token_ids,
        include_usage=wish.include_usage,
    )
    return await answer(request, served, [order], wish, shape)


def needs_chat_template(served: Served) -> TextModel:
    """Raises UserError where the model has none."""
    text = needs_tokenizer(served, "model")
    if text.chat_template is None:
        message = f"model {served.spec.model!r} has no chat template: send its prompt to /v1/completions"
        raise UserError(message, param="model", code="no_chat_template")
    return text


async def render(fields: Fields, text: TextModel, tools: Tools | None) -> str:
    """The prompt that `messages` make. Raises UserError."""
    messages = read_messages(fields)
    variables = fields.mapping("chat_template_kwargs") or {}
    for name in _NOT_VARIABLES & variables.keys():
        raise fields.refusal("chat_template_kwargs", f"may not set {name!r}")
    generation = fields.flag("add_generation_prompt", True)
    fields.unsupported("continue_final_message", (False,))
    if tools:
        variables = {**variables, "tools": list(tools.definitions)}

    def work() -> str:
        return text.render_chat(messages, add_generation_prompt=generation, **variables)

    try:
        if not text.has_rendered:
            return await asyncio.to_thread(work)
        return await beside_loop(work, len(msgspec.json.encode((messages, variables))))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        message = f"the model's chat template cannot render this conversation ({type(error).__name__})"
        raise UserError(message, param="messages") from None


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
