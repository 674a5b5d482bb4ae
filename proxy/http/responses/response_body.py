"""The parameters of `/v1/responses`, the chat request that they make, and the response as it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aegis.models.text.text_model import TextModel
from proxy.http.errors import shown
from proxy.http.fields import Fields, Schema, Unsupported
from proxy.http.ignored import Ignored
from proxy.http.parameters import (
    ANY_OBJECT,
    AnyText,
    Anything,
    Flag,
    Integer,
    Items,
    Object,
    OneOf,
    Text,
    refuse_unsupported,
    required,
)
from proxy.http.request.body import ModelBody
from proxy.http.request.late_instructions import told_by_user
from proxy.http.request.sampling import LOGPROBS_MAX, TOKENS_MAX, GenerationBody
from proxy.http.responses.input_items import ITEMS_MAX, prompt_messages
from proxy.http.responses.response_items import ResponseObject
from proxy.http.responses.tools import Tools, read_tool_choice, read_tools
from proxy.http.structured.tools import TOOLS_MAX, pass_over_strict
from proxy.http.translated import Translated

_STRING: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 256}


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _texts(*kinds: str) -> Schema:
    part = _object({"type": {"enum": list(kinds)}, "text": _STRING})
    return {"anyOf": [_STRING, {"type": "array", "items": part, "maxItems": ITEMS_MAX}]}


_MESSAGE = _object(
    {"role": {"enum": ["assistant", "developer", "system", "user"]}, "content": _texts("input_text", "output_text")},
    type={"const": "message"},
)
_ITEM: Schema = {
    "anyOf": [
        _MESSAGE,
        _object({"type": {"const": "function_call"}, "call_id": _NAME, "name": _NAME, "arguments": _STRING}),
        _object({"type": {"const": "function_call_output"}, "call_id": _NAME, "output": _texts("input_text")}),
        _object({"type": {"const": "reasoning"}}, content=_texts("reasoning_text"), summary=_texts("summary_text")),
    ]
}
_INPUT = {"anyOf": [_STRING, {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": ITEMS_MAX}]}
_TOOL = _object(
    {"type": _STRING}, name=_NAME, description=_STRING, parameters=dict(ANY_OBJECT), strict={"type": "boolean"}
)
_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required"]}, ANY_OBJECT]}
_AS_IN_CHAT = ("stream", "temperature", "top_p", "top_k", "seed", "priority", "pace", "parallel_tool_calls")
_TOLD_AGAIN = ("max_tool_calls", "prompt_cache_key", "safety_identifier", "user")
_NOT_SERVED = ("context_management", "moderation")
_SCORES = "message.output_text.logprobs"
_METADATA_MAX, _INCLUDE_MAX = 16, 64
_PASSED_OVER_CHARACTERS = 200  # that an error quotes


class Metadata(Object):
    """Strings by their names."""

    def check(self, value: Any, fields: Fields, name: str) -> dict[str, Any]:
        given = Object.check(self, value, fields, name)
        if len(given) > _METADATA_MAX:
            raise fields.invalid(name, f"may have at most {_METADATA_MAX} entries, not {len(given)}")
        for key, told in given.items():
            if not isinstance(told, str):
                raise fields.invalid(name, f"must have strings as values, not {shown(told)} for {shown(key)}")
        return given

    def schema(self) -> Schema:
        return {"type": "object", "additionalProperties": _STRING, "maxProperties": _METADATA_MAX}


class Includes(Items):
    """A list of strings."""

    def check(self, value: Any, fields: Fields, name: str) -> list[Any]:
        entries = Items.check(self, value, fields, name)
        for at, entry in enumerate(entries):
            if not isinstance(entry, str):
                raise fields.invalid(f"{name}[{at}]", f"must be a string, not {shown(entry)}")
        return entries


class ResponseBody(ModelBody):
    input = required(Anything(_INPUT, about="Text, or items: messages, reasoning, calls and their outputs"))
    instructions = AnyText()
    max_output_tokens = Integer(None, low=1, high=TOKENS_MAX)
    tools = Items(_TOOL, most=TOOLS_MAX)
    tool_choice = Anything(_CHOICE)
    parallel_tool_calls = Flag(True)
    text = Object()
    reasoning = Object()
    store = Flag(True)
    background = Flag(False)
    previous_response_id = Text(None)
    stream = Flag(False)
    stream_options = Object()
    metadata = Metadata()
    truncation = OneOf(("auto", "disabled"))
    temperature = GenerationBody.temperature
    top_p = GenerationBody.top_p
    top_k = GenerationBody.top_k
    seed = GenerationBody.seed
    priority = GenerationBody.priority
    pace = GenerationBody.pace
    chat_template_kwargs = Object()
    max_tool_calls = Anything({}, about="Without effect: no tool is run here")
    prompt_cache_key = Anything({}, about="Without effect: what was kept of an earlier prompt is always reused")
    prompt_cache_options = Anything({}, about="Without effect")
    prompt_cache_retention = Anything({}, about="Without effect")
    safety_identifier = Anything({}, about="Without effect")
    service_tier = Anything({}, about="Without effect")
    client_metadata = Anything({}, about="Without effect")
    user = Anything({}, about="Without effect")
    context_management = Anything({}, about="Ignored")
    include = Includes(
        _STRING, most=_INCLUDE_MAX, about=f"{_SCORES} gives the logprobs of text; other entries are ignored"
    )
    moderation = Anything({}, about="Ignored")
    conversation = Unsupported()
    prompt = Unsupported()
    top_logprobs = Integer(0, low=0, high=LOGPROBS_MAX)


def head_of(body: ResponseBody, response_id: str, created_s: int) -> ResponseObject:
    """The response as it begins. Raises UserError."""
    again = {name: body.take(name) for name in _TOLD_AGAIN}
    if body.background and (body.stream or not body.store):
        raise body.invalid("background", "cannot be had with 'stream', nor without 'store'")
    return ResponseObject(
        id=response_id,
        created_at=created_s,
        model=body.model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None, "summary": None} | (body.reasoning or {}),
        store=body.store,
        background=body.background,
        temperature=body.temperature,
        text={"format": {"type": "text"}} | (body.text or {}),
        tool_choice=body.tool_choice or "auto",
        tools=list(body.tools),
        top_logprobs=body.top_logprobs,
        top_p=body.top_p,
        truncation=body.truncation or "disabled",
        **again,
    )


def chat_request(
    body: ResponseBody, conversation: Sequence[dict[str, Any]], text: TextModel, ignored: Ignored
) -> Translated:
    """The chat request of a conversation. Raises UserError."""
    template, _ = text.chat_template or "", body.stream_options
    messages = prompt_messages(body.instructions, list(conversation), knows_developers="developer" in template)
    messages = told_by_user(messages, template)
    if not messages:
        passed_over = ignored.told("input[", _PASSED_OVER_CHARACTERS)
        more = f"; these items are not known here and were passed over: {passed_over}" if passed_over else ""
        raise body.invalid("input", f"must hold at least one message{more}")
    values: dict[str, Any] = {"model": body.model, "messages": messages}
    values |= {name: body.take(name) for name in _AS_IN_CHAT if body.given(name)}
    if body.max_output_tokens is not None:
        values["max_tokens"] = body.max_output_tokens
    choice, tools = _tools(body, text, ignored)
    if tools:
        values |= {"tools": list(tools.values())} | ({} if choice is None else {"tool_choice": choice})
    elif choice not in (None, "auto", "none"):
        if not body.tools:
            raise body.invalid("tool_choice", "needs 'tools'")
        ignored.add("tool_choice")
    if wanted := _output_format(body):
        values["response_format"] = wanted
    if body.chat_template_kwargs:
        values["chat_template_kwargs"] = body.chat_template_kwargs
    if (effort := (body.reasoning or {}).get("effort")) is not None:
        values["reasoning_effort"] = effort
    if _includes_scores(body, ignored) or body.top_logprobs:
        values |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    for name in _NOT_SERVED:
        if body.take(name):
            ignored.add(name)
    for name, known in (("reasoning", "effort"), ("text", "format")):
        for key, value in (body.take(name) or {}).items():
            if key != known and value:
                ignored.add(f"{name}.{key}")
    refuse_unsupported(body, ResponseBody)
    body.end()
    return Translated(values, tuple(tools))


def _includes_scores(body: ResponseBody, ignored: Ignored) -> bool:
    for entry in body.include:
        if entry != _SCORES:
            ignored.add("include", entry)
    return _SCORES in body.include


def _tools(body: ResponseBody, text: TextModel, ignored: Ignored) -> tuple[Any, Tools]:
    choice, tools = read_tool_choice(body, read_tools(body, ignored), ignored)
    pass_over_strict(tools, choice, text, ignored)
    return choice, tools


def _output_format(body: ResponseBody) -> dict[str, Any] | None:
    wanted = (body.text or {}).get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise body.invalid("text.format", f"must be an object, not {shown(wanted)}")
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: wanted[name] for name in wanted if name != "type"}}
