"""`/openapi.json`: the schema of requests and answers, errors included. It is made from the bodies that are read
(`bodies`) and the structs that are sent. The dashboard is not in it, because it is a page with files, for browsers."""

from __future__ import annotations

from functools import cache
from typing import Any

from msgspec.json import schema_components

import aegis
from aegis.core.clock import NS_PER_MS
from aegis.core.model import SLO_NS_MAX, SLO_NS_MIN
from aegis.core.request import PRIORITY_MAX
from aegis.telemetry.live_view import Live, SeenUntil
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.node_report import NodeReport
from proxy.http.admin.memory import Moved
from proxy.http.admin.model_admin import LIMIT_MAX, Removed
from proxy.http.admin.status import Status, Version
from proxy.http.errors import ErrorBody
from proxy.http.openai.chat_replies import ChatChoice, ChunkChoice
from proxy.http.openai.choices import Usage
from proxy.http.openai.completion_replies import Completion
from proxy.http.openai.models import ModelCard, ModelList
from proxy.http.openai.tokenize import Detokenized, Tokenized
from proxy.http.schema.bodies import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    FLAG,
    MODEL,
    TOKENIZE,
    Schema,
    body,
    number,
    text,
    whole,
)

_REPLIES = (
    ErrorBody,
    ChatChoice,
    ChunkChoice,
    Usage,
    Completion,
    Moved,
    ModelCard,
    ModelList,
    Removed,
    Status,
    Version,
    Detokenized,
    Tokenized,
    MemoryReport,
    NodeReport,
    Live,
)
_JSON, _EVENTS, _LINES = "application/json", "text/event-stream", "application/jsonl"
_PROBLEMS = {
    400: "A parameter is wrong; `error.param` names it",
    401: "No key, or none that is known",
    403: "Not with this key, or not from there",
    404: "No such model or instance",
    409: "It cannot be done now, or is being done",
    413: "The body is too large",
    422: "Another request had this id",
    429: "A limit is reached; `Retry-After` says when to come again",
    503: "Not at present: the server ends, or the model failed",
}
_ASKING = (400, 401, 404, 409, 413, 422, 429, 503)
_COMMANDING = (400, 401, 403, 404, 409, 413)


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    _, components = schema_components(_REPLIES, ref_template="#/components/schemas/{name}")
    components["ChatCompletion"] = _chat_completion()
    return {
        "openapi": "3.1.0",
        "info": {"title": "Aegis", "version": aegis.__version__},
        "security": [{}, {"key": []}],
        "paths": _asking() | _looking() | _commanding(),
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _chat_completion() -> Schema:
    """Whole, or a chunk of a stream."""
    properties = {
        "id": {"type": "string"},
        "object": {"enum": ["chat.completion", "chat.completion.chunk"]},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"anyOf": [_ref("ChatChoice"), _ref("ChunkChoice")]}},
        "usage": {"anyOf": [_ref("Usage"), {"type": "null"}]},
    }
    return {"type": "object", "properties": properties, "required": ["id", "object", "created", "model", "choices"]}


def _operation(
    about: str,
    reply: str | None = None,
    *,
    takes: Schema | None = None,
    problems: tuple[int, ...] = (401,),
    kinds: tuple[str, ...] = (),
    parameters: tuple[dict[str, Any], ...] = (),
) -> dict[str, Any]:
    """`kinds` are those of the reply besides `reply`, which is JSON."""
    content: dict[str, Any] = {_JSON: {"schema": _ref(reply)}} if reply else {}
    content |= {kind: {} for kind in kinds}
    error = {_JSON: {"schema": _ref("ErrorBody")}}
    operation: dict[str, Any] = {
        "summary": about,
        "parameters": list(parameters),
        "responses": {"200": {"description": "Done", "content": content}}
        | {str(status): {"description": _PROBLEMS[status], "content": error} for status in problems},
    }
    if takes is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": takes}}}
    return operation


def _asking() -> dict[str, Any]:
    def post(about: str, takes: Schema, reply: str, *kinds: str) -> dict[str, Any]:
        return {"post": _operation(about, reply, takes=takes, problems=_ASKING, kinds=kinds)}

    return {
        "/v1/completions": post("Continue prompts", COMPLETION, "Completion", _EVENTS),
        "/v1/chat/completions": post("Answer a conversation", CHAT, "ChatCompletion", _EVENTS),
        "/tokenize": post("Text as token ids", TOKENIZE, "Tokenized"),
        "/detokenize": post("Token ids as text", DETOKENIZE, "Detokenized"),
    }


def _looking() -> dict[str, Any]:
    name = {"name": "model", "in": "path", "required": True, "schema": MODEL}
    status = {"get": _operation("200: it is well", "Status")}
    status["get"]["responses"]["503"] = {"description": "It is not", "content": {_JSON: {"schema": _ref("ErrorBody")}}}
    return {
        "/v1/models": {"get": _operation("The models that are served", "ModelList")},
        "/v1/models/{model}": {"get": _operation("One of them", "ModelCard", problems=(401, 404), parameters=(name,))},
        "/health": status,
        "/ready": status,
        "/version": {"get": _operation("Which aegis this is", "Version")},
        "/metrics": {"get": _operation("For Prometheus", kinds=("text/plain",))},
    }


def _change() -> Schema:
    deadline = number(SLO_NS_MIN / NS_PER_MS, SLO_NS_MAX / NS_PER_MS)
    limit = whole(1, LIMIT_MAX)
    limits = body({"requests_per_minute": limit, "tokens_per_minute": limit, "concurrent": limit})
    slo = body({"ttft_ms": deadline, "tbt_ms": deadline})
    priority = whole(-PRIORITY_MAX, PRIORITY_MAX)
    return body({"model": MODEL, "slo": slo, "priority": priority, "limits": limits, "pin": FLAG}, "model")


def _commanding() -> dict[str, Any]:
    """With the admin key, or without one from the server's own machine."""

    def from_(name: str) -> dict[str, Any]:
        return {"name": name, "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}}

    since = from_("since")
    times = {"name": "times", "in": "query", "schema": {"enum": ["0", "1"]}}
    timeout = number(0.001, 3600)
    size: Schema = {"anyOf": [{"type": "integer", "minimum": 1}, text(64)]}

    def get(about: str, reply: str | None = None, *kinds: str, asks: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
        return {"get": _operation(about, reply, problems=(400, 401, 403), kinds=kinds, parameters=asks)}

    def post(about: str, takes: Schema, reply: str) -> dict[str, Any]:
        return {"post": _operation(about, reply, takes=takes, problems=_COMMANDING)}

    return {
        "/models/load": post(
            "Serve a checkpoint directory or hub id",
            body({"source": text(4096), "name": text(256)}, "source"),
            "ModelCard",
        ),
        "/models/sse": get("What becomes of models, as it happens", None, _EVENTS),
        "/models/update": post("Change a model that is served", _change(), "ModelCard"),
        "/models/evict": post(
            "Take a model's weights out of memory until its next request", body({"model": MODEL}, "model"), "ModelCard"
        ),
        "/models/unload": post("Serve a model no more", body({"model": MODEL}, "model"), "Removed"),
        "/debug/memory": get("All memory of the server", "MemoryReport"),
        "/debug/memory/limit": post(
            "Limit what an instance may hold",
            body({"instance": text(256), "limit": size, "timeout_s": timeout}, "instance", "limit"),
            "Moved",
        ),
        "/debug/memory/trim": post(
            "Take back what an instance does not need",
            body({"instance": text(256), "timeout_s": timeout}, "instance"),
            "Moved",
        ),
        "/debug/node": get("What the server consists of", "NodeReport"),
        "/debug/live": get("All that watchers show", "Live", asks=tuple(map(from_, SeenUntil.__struct_fields__))),
        "/debug/spans": get("What instances did", None, _LINES, asks=(since,)),
        "/debug/records": get("What became of requests", None, _LINES, asks=(since, times)),
        "/debug/decisions": get("What was decided and why", None, _LINES, asks=(since,)),
    }
