"""The messages of a chat request, checked and in the one form chat templates take: role and text."""

from __future__ import annotations

from typing import Any

from proxy.http.errors import shown
from proxy.http.fields import Fields

MESSAGES_MAX = 4096
_ROLES = ("assistant", "developer", "system", "user")
_TOOL_ROLES = ("function", "tool")
_ASKS_FOR_TOOLS = ("function_call", "tool_call_id", "tool_calls")


def read_messages(fields: Fields, name: str = "messages") -> list[dict[str, Any]]:
    """Each `{"role", "content"}`, with `name` where it was given. Raises UserError naming the message at fault."""
    messages = fields.items(name, most=MESSAGES_MAX)
    if not messages:
        raise fields.refusal(name, "must hold at least one message")
    return [_read_message(Fields(_object(fields, name, i, entry), f"{name}[{i}].")) for i, entry in enumerate(messages)]


def _object(fields: Fields, name: str, index: int, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise fields.refusal(f"{name}[{index}]", f"must be an object with 'role' and 'content', not {shown(entry)}")
    return entry


def _read_message(fields: Fields) -> dict[str, Any]:
    role = fields.required_text("role")
    if role in _TOOL_ROLES:
        raise fields.refusal("role", f"{role!r} is not supported here: tools are not")
    if role not in _ROLES:
        raise fields.refusal("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    message: dict[str, Any] = {"role": role, "content": _read_content(fields)}
    speaker = fields.text("name", None)
    if speaker is not None:
        message["name"] = speaker
    for name in _ASKS_FOR_TOOLS:
        fields.unsupported(name, ([],))
    for name in ("audio", "refusal"):
        fields.unsupported(name)
    fields.end()
    return message


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
