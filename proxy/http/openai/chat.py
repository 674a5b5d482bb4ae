"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import time
from typing import Any

from fastapi import Request, Response
from msgspec import Struct, structs

from aegis.core.errors import UserError
from aegis.models.text.text_model import TextModel
from aegis.models.text.worker_messages import Rendered, TooManyCharacters, TooManyTokens
from proxy.http.client_disconnect import while_connected
from proxy.http.direct_routes import direct_router
from proxy.http.fields import Unsupported
from proxy.http.ignored import Ignored
from proxy.http.market import Served
from proxy.http.openai.answer import answer
from proxy.http.openai.chat_reader import Reading
from proxy.http.openai.chat_replies import ChatCompletion, ChatCompletionChunk, ChatShape
from proxy.http.openai.choices import SequenceRequest
from proxy.http.openai.held_requests import held
from proxy.http.openai.models import find_servable
from proxy.http.openai.reply_shape import Shape
from proxy.http.openapi import ASKING, EVENTS, operation
from proxy.http.parameters import Anything, Flag, Integer, Object, OneOf, refuse_unsupported
from proxy.http.request.body import read_body
from proxy.http.request.messages import MessagesBody, read_messages
from proxy.http.request.prompts import (
    characters_max,
    known,
    max_tokens_for,
    needs_tokenizer,
    tokens_max,
    too_many_characters,
    too_many_tokens,
)
from proxy.http.request.sampling import (
    LOGPROBS_MAX,
    TOKENS_MAX,
    GenerationBody,
    GenerationParameters,
    check_sequences,
    held_to,
    read_parameters,
)
from proxy.http.request.text_workers import characters_of
from proxy.http.request.worker_thread import beside_loop
from proxy.http.request_ids import request_id_for
from proxy.http.security.admission import admitted, who
from proxy.http.security.large_bodies import SMALL_BYTES
from proxy.http.settings import market_of, settings_of, texts_of
from proxy.http.streaming.reasoning import marks_of
from proxy.http.structured.output_format import check_grammar
from proxy.http.structured.tools import Tools, ToolsBody, read_tools

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

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NOT_SERVED = ("metadata", "store", "verbosity")

router = direct_router()


class Conversation(Struct, frozen=True):
    """A request as it was read, for those who word its reply."""

    request_id: str
    served: Served
    text: TextModel
    reading: Reading
    parameters: GenerationParameters
    prompt: tuple[int, ...]
    logprobs: bool


Wording = Callable[[Conversation], Shape]


class ConversationBody(MessagesBody, ToolsBody):
    """The parameters from which a chat template makes a prompt."""

    add_generation_prompt = Flag(True)
    chat_template_kwargs = Object()
    reasoning_effort = OneOf(_EFFORTS)
    continue_final_message = Unsupported(False)


class ChatBody(GenerationBody, ConversationBody):
    max_completion_tokens = Integer(None, low=1, high=TOKENS_MAX)
    logprobs = Flag(False)
    top_logprobs = Integer(None, low=0, high=LOGPROBS_MAX)
    audio = Unsupported()
    chat_template = Unsupported()
    documents = Unsupported([])
    echo = Unsupported(False)
    function_call = Unsupported("none")
    functions = Unsupported([])
    metadata = Anything({}, about="Ignored")
    mm_processor_kwargs = Unsupported()
    modalities = Unsupported(["text"])
    prediction = Unsupported()
    prompt_cache_key = Anything({}, about="Without effect: what was kept of an earlier prompt is always reused")
    prompt_cache_options = Anything({}, about="Without effect")
    prompt_cache_retention = Anything({}, about="Without effect")
    safety_identifier = Anything({}, about="Without effect")
    store = Anything({}, about="Ignored")
    verbosity = Anything({}, about="Ignored")
    web_search_options = Unsupported()


@router.post(
    "/v1/chat/completions",
    **operation(
        "Answer a conversation",
        ChatCompletion,
        ChatCompletionChunk,
        takes=ChatBody,
        kinds=(EVENTS,),
        problems=ASKING,
    ),
)
async def create_chat_completion(request: Request) -> Response:
    body = await read_body(request, ChatBody, settings_of(request).body_bytes_max)
    ignored = Ignored()
    for name in _NOT_SERVED:
        if body.take(name):
            ignored.add(name)
    return ignored.tell(request, await held(request, body, lambda: converse(request, body, _worded)))


def _worded(asked: Conversation) -> ChatShape:
    return ChatShape(
        id=f"chatcmpl-{asked.request_id}",
        created_s=int(time()),
        model=asked.served.spec.model,
        text=asked.text,
        reading=asked.reading,
        logprobs=asked.logprobs,
        token_ids=asked.parameters.return_token_ids,
        include_usage=asked.parameters.include_usage,
    )


async def converse(request: Request, body: ChatBody, worded: Wording, *, cuts: bool = False) -> Response:
    """Answers a conversation in the words of `worded`. `cuts`: an answer that may be longer than what the model has
    room for ends there. Raises UserError; ClientGone if the client has left."""
    served = find_servable(market_of(request), body)
    text = needs_chat_template(served)
    body.elsewhere("prompt", "send 'messages' here, or 'prompt' to /v1/completions")
    logprobs = _read_logprobs(body)
    max_tokens = _read_max_tokens(body)
    parameters = await beside_loop(
        lambda: read_parameters(body, served, max_tokens=max_tokens, logprobs=logprobs),
        body.nbytes,
        few=SMALL_BYTES,
    )
    refuse_unsupported(body, ChatBody)
    async with admitted(request, served) as admission:
        asked = await _read(request, body, served, text, parameters, logprobs is not None)
        limit = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        most = _most_tokens(asked, limit, cuts=cuts)
        return await answer(
            request, served, [SequenceRequest(asked.prompt, most)], asked.parameters, worded(asked), admission
        )


def _most_tokens(asked: Conversation, limit: str, *, cuts: bool) -> int:
    """Of the answer; `limit` is the parameter that said it. Raises UserError."""
    wanted = asked.parameters.max_tokens if cuts else None
    parameters = structs.replace(asked.parameters, max_tokens=None) if cuts else asked.parameters
    return max_tokens_for(asked.served, len(asked.prompt), parameters, default=wanted, param="messages", limit=limit)


async def _read(
    request: Request,
    body: ChatBody,
    served: Served,
    text: TextModel,
    parameters: GenerationParameters,
    logprobs: bool,
) -> Conversation:
    tools = await beside_loop(lambda: read_tools(body, text), body.nbytes, few=SMALL_BYTES)
    rendered, tokens = await render(request, body, served, text, tools)
    body.end()
    grammar = parameters.sampling.grammar
    free = grammar is None or grammar.kind == "structural_tag"  # these leave room for reasoning
    answer = parameters.held_to
    if wanted := (tools.held_beside(answer, text) if answer else tools.held_to()) if tools else None:
        parameters = structs.replace(parameters, held_to=wanted, sampling=held_to(body, parameters.sampling, wanted))
        free = free and wanted.grammar.kind == "structural_tag"
        tools = None if wanted is answer else tools  # no call can be made then
    marks = marks_of(text.chat_template or "") if free else None
    reading = Reading(rendered, marks, tools)
    parameters = structs.replace(parameters, shown=reading.markers)
    prompt = known(body, "messages", tokens, served.spec)
    if not prompt:
        raise body.invalid("messages", "make an empty prompt")
    check_sequences([prompt], parameters)
    if parameters.held_to:
        await check_grammar(request, served, parameters.held_to)
    request_id = request_id_for(request, parameters.request_id)
    return Conversation(request_id, served, text, reading, parameters, prompt, logprobs)


def needs_chat_template(served: Served) -> TextModel:
    """Raises UserError if the model has none."""
    text = needs_tokenizer(served, "model")
    if text.chat_template is None:
        message = f"model {served.spec.model!r} has no chat template: send its prompt to /v1/completions"
        raise UserError(message, param="model", code="no_chat_template")
    return text


async def render(
    request: Request, body: ConversationBody, served: Served, text: TextModel, tools: Tools | None
) -> tuple[str, tuple[int, ...]]:
    """The prompt that `messages` make, and its tokens. Raises UserError; ClientGone if the client has left."""
    messages, variables = await beside_loop(lambda: read_conversation(body, text, tools), body.nbytes, few=SMALL_BYTES)
    size = characters_of(messages) + characters_of(list(variables.values()))
    rendering = texts_of(request).render(
        who(request),
        text,
        messages,
        variables,
        size=size,
        add_generation_prompt=body.add_generation_prompt,
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


def read_conversation(
    body: ConversationBody, text: TextModel, tools: Tools | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """`messages`, and the variables of the template. Raises UserError."""
    messages = read_messages(body)
    variables = body.chat_template_kwargs or {}
    for name in _NOT_VARIABLES & variables.keys():
        raise body.invalid("chat_template_kwargs", f"may not set {name!r}")
    refuse_unsupported(body, ConversationBody)
    variables = _efforts(body.reasoning_effort, text.chat_template or "") | variables
    return messages, {**variables, "tools": list(tools.definitions)} if tools else variables


def _efforts(effort: str | None, template: str) -> dict[str, Any]:
    """The variables that say to a template how much the model is to reason, of those that it knows."""
    if effort is None:
        return {}
    said = {"enable_thinking": effort != "none", "reasoning_effort": effort}
    return {name: value for name, value in said.items() if name in template}


def _read_max_tokens(body: ChatBody) -> int | None:
    """`max_completion_tokens` is the newer name; both may be given if they agree."""
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise body.invalid("max_completion_tokens", f"({newer}) and 'max_tokens' ({older}) differ: send one of them")
    return newer if newer is not None else older


def _read_logprobs(body: ChatBody) -> int | None:
    """The number of alternatives to report per token; None for no logprobs at all."""
    wanted, top = body.logprobs, body.top_logprobs
    if top is not None and not wanted:
        raise body.invalid("top_logprobs", "needs 'logprobs': true")
    return (top or 0) if wanted else None
