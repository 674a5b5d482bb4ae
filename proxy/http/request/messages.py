"""The messages of a chat request, checked and in the one form chat templates take: role and text."""

from __future__ import annotations

from typing import Any

from proxy.http.errors import shown
from proxy.http.fields import Fields
from proxy.http.json_bounds import InnerJson

MESSAGES_MAX = 4096
CALLS_MAX = 128
_ROLES = ("assistant", "developer", "system", "tool", "user")


def read_messages(fields: Fields, name: str = "messages") -> list[dict[str, Any]]:
    """Each `{"role", "content"}`, with `name`, `tool_calls`, `tool_call_id` and `reasoning_content` where given. Raises
    UserError naming the message at fault."""
    messages = fields.items(name, most=MESSAGES_MAX)
    if not messages:
        raise fields.refusal(name, "must hold at least one message")
    inner = InnerJson()
    return [
        _read_message(Fields(_object(fields, name, i, entry), f"{name}[{i}]."), inner)
        for i, entry in enumerate(messages)
    ]


def _object(fields: Fields, name: str, index: int, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise fields.refusal(f"{name}[{index}]", f"must be an object with 'role' and 'content', not {shown(entry)}")
    return entry


def _read_message(fields: Fields, inner: InnerJson) -> dict[str, Any]:
    role = fields.required_text("role")
    if role not in _ROLES:
        raise fields.refusal("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    message: dict[str, Any] = {"role": role}
    if role == "assistant":
        message |= _read_answer(fields, inner)
    if role == "tool":
        message["tool_call_id"] = fields.required_text("tool_call_id")
    message["content"] = "" if "tool_calls" in message and not fields.given("content") else _read_content(fields)
    speaker = fields.text("name", None)
    if speaker is not None:
        message["name"] = speaker
    if role != "assistant":
        fields.unsupported("tool_calls", ([],))
    for name in ("audio", "function_call", "refusal"):
        fields.unsupported(name)
    fields.end()
    return message


def _read_answer(fields: Fields, inner: InnerJson) -> dict[str, Any]:
    """Reads the parts of an earlier answer besides its content."""
    answer: dict[str, Any] = {}
    for name in ("reasoning_content", "reasoning"):
        thought = fields.take(name)
        if isinstance(thought, str):
            answer["reasoning_content"] = thought
        elif thought is not None:
            raise fields.refusal(name, f"must be a string, not {shown(thought)}")
    calls = fields.items("tool_calls", most=CALLS_MAX)
    if calls:
        answer["tool_calls"] = [_read_call(fields, index, call, inner) for index, call in enumerate(calls)]
    return answer


def _read_call(fields: Fields, index: int, call: Any, inner: InnerJson) -> dict[str, Any]:
    """Its arguments as an object, which is what templates take."""
    if not isinstance(call, dict):
        raise fields.refusal(f"tool_calls[{index}]", f"must be an object, not {shown(call)}")
    entry = fields.entry("tool_calls", index, call)
    called, kind = entry.required_text("id"), entry.text("type", "function")
    function = entry.nested("function")
    name, arguments = function.required_text("name"), function.take("arguments")
    try:
        parsed = inner.decoded(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise function.refusal("arguments", "must be a JSON object, as a string") from None
    if not isinstance(parsed, dict):
        raise function.refusal("arguments", f"must be a JSON object, as a string, not {shown(arguments)}")
    for each in (function, entry):
        each.end()
    return {"id": called, "type": kind, "function": {"name": name, "arguments": parsed}}


def _read_content(fields: Fields) -> str:
    """A string, or text parts, which become the lines of one."""
    content = fields.take("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise fields.refusal("content", f"must be a string or a list of text parts, not {shown(content)}")
    return "\n".join(_read_part(fields, index, part) for index, part in enumerate(content))


def _read_part(fields: Fields, index: int, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise fields.refusal(f"content[{index}]", f"must be a part of type 'text', not {shown(kind)}")
    text = part.get("text")
    if not isinstance(text, str):
        raise fields.refusal(f"content[{index}].text", f"must be a string, not {shown(text)}")
    return text
