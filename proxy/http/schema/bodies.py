"""The bodies that clients send, as JSON Schemas. What takes them apart is in `completions`, `chat` and their like; that
both know the same parameters is tested.

Null counts as absent everywhere. Parameters that are refused, whatever their value, are not listed; those that have one
harmless value are.
"""

from __future__ import annotations

from typing import Any

from aegis.core.ids import MODEL_NAME_PATTERN
from aegis.core.request import PRIORITY_MAX
from proxy.http.fields import INT64_MAX
from proxy.http.request.messages import CALLS_MAX, MESSAGES_MAX
from proxy.http.request.prompts import PROMPTS_MAX
from proxy.http.request.sampling import (
    CHOICES_MAX,
    LOGPROBS_MAX,
    REPETITION_PENALTY_MIN,
    STOP_CHARACTERS_MAX,
    STOPS_MAX,
    TEMPERATURE_MIN,
    TOKENS_MAX,
)
from proxy.http.structured.tools import TOOLS_MAX

Schema = dict[str, Any]

FREE: Schema = {"type": "object"}
FLAG: Schema = {"type": "boolean"}
MODEL: Schema = {"type": "string", "pattern": f"^{MODEL_NAME_PATTERN}$"}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": TOKENS_MAX}


def text(most: int | None = None, **more: Any) -> Schema:
    """A string that is not empty."""
    return {"type": "string", "minLength": 1, **({"maxLength": most} if most else {}), **more}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def each(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def body(properties: dict[str, Schema], *required: str) -> Schema:
    """An object of these alone, each of which may be null unless it is required."""
    known = {name: schema if name in required else _or_null(schema) for name, schema in properties.items()}
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def only(*values: Any) -> Schema:
    """A value that asks for nothing; any other is refused."""
    return {"enum": list(values)}


def _of_type(kind: str, properties: dict[str, Schema], *required: str) -> Schema:
    return body({"type": {"const": kind}} | properties, "type", *required)


_RESPONSE_FORMAT: Schema = {
    "oneOf": [
        _of_type("text", {}),
        _of_type("json_object", {}),
        _of_type(
            "json_schema",
            {
                "json_schema": body(
                    {"name": text(256), "description": text(4096), "strict": FLAG, "schema": FREE}, "name", "schema"
                )
            },
            "json_schema",
        ),
        _of_type("structural_tag", {"format": FREE}, "format"),
    ]
}
_STRUCTURED_OUTPUTS: Schema = body(
    {
        "json": {"anyOf": [FREE, text()]},
        "regex": text(),
        "choice": each(text(), 4096, 1),
        "grammar": text(),
        "json_object": only(True),
        "structural_tag": {"anyOf": [FREE, text()]},
        "disable_any_whitespace": only(True),
        "disable_additional_properties": only(False),
    }
) | {"description": "Exactly one of json, regex, choice, grammar, json_object and structural_tag"}

_SHARED: dict[str, Schema] = {
    "model": MODEL,
    "stream": FLAG,
    "stream_options": body(
        {"include_usage": FLAG, "include_obfuscation": only(False), "continuous_usage_stats": only(False)}
    ),
    "seed": whole(-INT64_MAX - 1, INT64_MAX),
    "user": text(1024),
    "n": whole(1, CHOICES_MAX),
    "priority": whole(-PRIORITY_MAX, PRIORITY_MAX) | {"description": "The lower, the earlier"},
    "request_id": text(128, pattern="^[!-~]+$"),
    "return_token_ids": FLAG,
    "max_tokens": whole(1, TOKENS_MAX),
    "min_tokens": whole(0, TOKENS_MAX),
    "ignore_eos": FLAG,
    "temperature": {"anyOf": [{"const": 0}, number(TEMPERATURE_MIN, 2)]},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": whole(-1, TOKENS_MAX),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(REPETITION_PENALTY_MIN, 2),
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[0-9]{1,9}$": number(-100, 100)},
        "additionalProperties": False,
    },
    "stop": {"anyOf": [text(STOP_CHARACTERS_MAX), each(text(STOP_CHARACTERS_MAX), STOPS_MAX)]},
    "stop_token_ids": each(TOKEN_ID, 1024),
    "response_format": _RESPONSE_FORMAT,
    "structured_outputs": _STRUCTURED_OUTPUTS,
    "allowed_token_ids": only([]),
    "bad_words": only([]),
    "include_stop_str_in_output": only(False),
    "length_penalty": only(1),
    "logits_processors": only([]),
    "return_tokens_as_token_ids": only(False),
    "service_tier": only("auto", "default"),
    "skip_special_tokens": only(True),
    "spaces_between_special_tokens": only(True),
    "use_beam_search": only(False),
}

COMPLETION = body(
    _SHARED
    | {
        "prompt": {
            "anyOf": [
                text(),
                each(TOKEN_ID, 1 << 22, 1),
                each({"anyOf": [text(), each(TOKEN_ID, 1 << 22, 1)]}, PROMPTS_MAX, 1),
            ]
        },
        "add_special_tokens": FLAG,
        "logprobs": whole(0, LOGPROBS_MAX),
        "echo": FLAG,
        "best_of": whole(1, CHOICES_MAX) | {"description": "1, or as many as n"},
        "suffix": only(""),
    },
    "model",
    "prompt",
)

_CONTENT: Schema = {
    "anyOf": [
        {"type": "string"},
        each(
            {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
            4096,
            1,
        ),
    ]
}
_CALL = body(
    {
        "id": text(256),
        "type": only("function"),
        "function": body({"name": text(256), "arguments": {"anyOf": [{"type": "string"}, FREE]}}, "name"),
    },
    "id",
    "function",
)
_MESSAGE: Schema = {
    "oneOf": [
        body(
            {
                "role": only("system", "developer", "user"),
                "content": _CONTENT,
                "name": text(256),
                "tool_calls": only([]),
            },
            "role",
            "content",
        ),
        body(
            {
                "role": only("assistant"),
                "content": _CONTENT,
                "name": text(256),
                "reasoning_content": {"type": "string"},
                "reasoning": {"type": "string"},
                "tool_calls": each(_CALL, CALLS_MAX),
            },
            "role",
        ),
        body(
            {"role": only("tool"), "content": _CONTENT, "tool_call_id": text(256), "name": text(256)},
            "role",
            "content",
            "tool_call_id",
        ),
    ]
}
_FUNCTION = body(
    {
        "name": text(128, pattern="^[A-Za-z0-9_.-]+$"),
        "description": {"type": "string"},
        "parameters": FREE,
        "strict": FLAG,
    },
    "name",
)
CONVERSATION: dict[str, Schema] = {
    "messages": each(_MESSAGE, MESSAGES_MAX, 1),
    "add_generation_prompt": FLAG,
    "continue_final_message": only(False),
    "chat_template_kwargs": FREE,
    "tools": each(_of_type("function", {"function": _FUNCTION}, "function"), TOOLS_MAX),
    "tool_choice": {
        "anyOf": [
            only("none", "auto", "required"),
            _of_type("function", {"function": body({"name": text(256)}, "name")}, "function"),
        ]
    },
    "parallel_tool_calls": FLAG,
}

CHAT = body(
    _SHARED
    | CONVERSATION
    | {
        "max_completion_tokens": whole(1, TOKENS_MAX),
        "logprobs": FLAG,
        "top_logprobs": whole(0, LOGPROBS_MAX),
        "documents": only([]),
        "echo": only(False),
        "function_call": only("none"),
        "functions": only([]),
        "metadata": only({}),
        "modalities": only(["text"]),
        "store": only(False),
    },
    "model",
    "messages",
)
TOKENIZE = body({"model": MODEL, "prompt": text(), "add_special_tokens": FLAG} | CONVERSATION, "model")
DETOKENIZE = body({"model": MODEL, "tokens": each(TOKEN_ID, 1 << 22)}, "model", "tokens")
