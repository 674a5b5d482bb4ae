"""The messages of a chat request, checked and in the one form chat templates take: role and text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.http.errors import shown
from proxy.http.fields import Fields, Schema, Unsupported
from proxy.http.json_bounds import InnerJson
from proxy.http.parameters import (
    ANY_OBJECT,
    AnyText,
    Anything,
    Items,
    OneOf,
    RequiredNested,
    Text,
    WithoutDefault,
    refuse_unsupported,
    required,
    schema_of,
)

MESSAGES_MAX = 4096
CALLS_MAX = 128
ROLES = ("assistant", "developer", "system", "tool", "user")
_OF_CLIENTS = "Without effect: OpenAI's own client adds it to an answer"
_PARTS_MAX = 4096  # in the schema: the size of a body bounds them
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


@dataclass(slots=True, eq=False)
class Content(WithoutDefault[str]):
    """A string, or text parts, which become the lines of one."""

    def check(self, value: Any, fields: Fields, name: str) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not value:
            raise fields.invalid(name, f"must be a string or a list of text parts, not {shown(value)}")
        return "\n".join(_read_part(fields, name, index, part) for index, part in enumerate(value))

    def schema(self) -> Schema:
        parts = {"type": "array", "items": _TEXT_PART, "minItems": 1, "maxItems": _PARTS_MAX}
        return {"anyOf": [{"type": "string"}, parts]}


def _read_part(fields: Fields, name: str, index: int, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise fields.invalid(f"{name}[{index}]", f"must be a part of type 'text', not {shown(kind)}")
    text = part.get("text")
    if not isinstance(text, str):
        raise fields.invalid(f"{name}[{index}].text", f"must be a string, not {shown(text)}")
    return text


class CalledFunction(Fields):
    name = required(Text(None))
    arguments = Anything({"anyOf": [{"type": "string"}, ANY_OBJECT]}, required=True)
    parsed_arguments = Anything({}, about=_OF_CLIENTS)


class EarlierCall(Fields):
    id = required(Text(None))
    type = Text("function", narrower={"enum": ["function"]})
    function = RequiredNested(CalledFunction)
    index = Anything({}, about=_OF_CLIENTS)


class Message(Fields):
    """One of any role."""

    role = required(OneOf(ROLES))
    content = Content()
    name = Text(None)
    audio = Unsupported()
    function_call = Unsupported()
    refusal = Unsupported()


class PromptMessage(Message):
    role = required(OneOf(("developer", "system", "user")))
    tool_calls = Unsupported([])


class AnswerMessage(Message):
    """An earlier answer. It needs no content where it called tools."""

    role = required(OneOf(("assistant",)))
    content = Content(required=False)
    reasoning_content = AnyText()
    reasoning = AnyText()
    tool_calls = Items(EarlierCall, most=CALLS_MAX)
    annotations = Unsupported([])
    parsed = Anything({}, about=_OF_CLIENTS)


class ToolMessage(PromptMessage):
    """What a tool that was called gave back."""

    role = required(OneOf(("tool",)))
    tool_call_id = required(Text(None))


@dataclass(slots=True, eq=False)
class Messages(WithoutDefault[list[Any]]):
    """A list with at least one message; `read_messages` reads each."""

    def check(self, value: Any, fields: Fields, name: str) -> list[Any]:
        messages = [] if value is None else _LIST.check(value, fields, name)
        if not messages:
            raise fields.invalid(name, "must hold at least one message")
        return messages

    def schema(self) -> Schema:
        return _LIST.schema()


_KINDS = (PromptMessage, AnswerMessage, ToolMessage)
_LIST = Items({"oneOf": [schema_of(kind) for kind in _KINDS]}, most=MESSAGES_MAX, least=1)


class MessagesBody(Fields):
    messages = Messages()


def read_messages(body: MessagesBody) -> list[dict[str, Any]]:
    """Each `{"role", "content"}`, with `name`, `tool_calls`, `tool_call_id` and `reasoning_content` where given. Raises
    UserError naming the message at fault."""
    inner = InnerJson()
    return [_read_message(_message(body, index, entry), inner) for index, entry in enumerate(body.messages)]


def _message(body: MessagesBody, index: int, entry: Any) -> Message:
    if not isinstance(entry, dict):
        raise body.invalid(f"messages[{index}]", f"must be an object with 'role' and 'content', not {shown(entry)}")
    role = entry.get("role")
    kind = AnswerMessage if role == "assistant" else ToolMessage if role == "tool" else PromptMessage
    return kind(entry, f"messages[{index}].")


def _read_message(fields: Message, inner: InnerJson) -> dict[str, Any]:
    message: dict[str, Any] = {"role": Message.role.of(fields)}
    if isinstance(fields, AnswerMessage):
        message |= _read_answer(fields, inner)
    elif isinstance(fields, ToolMessage):
        message["tool_call_id"] = fields.tool_call_id
    message["content"] = "" if "tool_calls" in message and not fields.given("content") else fields.content
    speaker = fields.name
    if speaker is not None:
        message["name"] = speaker
    if not fields.names_are_supported():  # which nearly all messages' are
        refuse_unsupported(fields, AnswerMessage if isinstance(fields, AnswerMessage) else PromptMessage)
        refuse_unsupported(fields, Message)
        fields.end()
    return message


def _read_answer(fields: AnswerMessage, inner: InnerJson) -> dict[str, Any]:
    """Reads the parts of an earlier answer besides its content."""
    answer: dict[str, Any] = {}
    for thought in (fields.reasoning_content, fields.reasoning):
        if thought is not None:
            answer["reasoning_content"] = thought
    calls = fields.tool_calls
    if calls:
        entries = enumerate(calls)
        answer["tool_calls"] = [_read_call(fields, f"tool_calls[{index}]", call, inner) for index, call in entries]
    return answer


def _read_call(fields: AnswerMessage, name: str, call: Any, inner: InnerJson) -> dict[str, Any]:
    """Reads its arguments as an object, because templates take that. Calls that were cut off come back too: they count
    as having none."""
    if not isinstance(call, dict):
        raise fields.invalid(name, f"must be an object, not {shown(call)}")
    entry = fields.nested(EarlierCall, name, call)
    called, kind, function = entry.id, entry.type, entry.function
    told, arguments = function.name, function.arguments
    parsed = inner.arguments(arguments) or {} if isinstance(arguments, str) else arguments
    if not isinstance(parsed, dict):
        raise function.invalid("arguments", f"must be a JSON object, as a string, not {shown(arguments)}")
    for each in (function, entry):
        each.end()
    return {"id": called, "type": kind, "function": {"name": told, "arguments": parsed}}
