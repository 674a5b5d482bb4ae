"""The forms of messages, blocks and tools of Anthropic's API, for its description; what is read of them is in
`conversation` and `tools`."""

from __future__ import annotations

from proxy.http.fields import Schema
from proxy.http.parameters import ANY_OBJECT
from proxy.http.request.messages import CALLS_MAX, MESSAGES_MAX

_STRING: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 256}


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _block(kind: str, required: dict[str, Schema], **optional: Schema) -> Schema:
    return _object({"type": {"const": kind}} | required, **optional)


def _texts_or(*blocks: Schema, most: int = MESSAGES_MAX) -> Schema:
    return {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": list(blocks)}, "maxItems": most}]}


_TEXT = _block("text", {"text": _STRING})
_RESULT = _block("tool_result", {"tool_use_id": _NAME}, content=_texts_or(_TEXT), is_error={"type": "boolean"})
_CALL = _block("tool_use", {"id": _NAME, "name": _NAME, "input": dict(ANY_OBJECT)})
_THOUGHT = _block("thinking", {"thinking": _STRING}, signature=_STRING)

SYSTEM = _texts_or(_TEXT)
TURN: Schema = {
    "anyOf": [
        _object({"role": {"const": "user"}, "content": _texts_or(_TEXT, _RESULT)}),
        _object({"role": {"const": "assistant"}, "content": _texts_or(_TEXT, _THOUGHT, _CALL, most=CALLS_MAX)}),
        _object({"role": {"const": "system"}, "content": SYSTEM}),
    ]
}
TOOL: Schema = {
    "anyOf": [
        _object({"name": _NAME, "input_schema": dict(ANY_OBJECT)}, description=_STRING, type={"const": "custom"}),
        _object({"name": _NAME, "type": _STRING}),  # of the vendor's server
    ]
}
CHOICE = _object(
    {"type": {"enum": ["any", "auto", "none", "tool"]}}, name=_NAME, disable_parallel_tool_use={"type": "boolean"}
)
THINKING_KINDS = ("adaptive", "between_tools", "disabled", "enabled")
THINKING = _object({"type": {"enum": list(THINKING_KINDS)}}, budget_tokens={"type": "integer", "minimum": 1})
