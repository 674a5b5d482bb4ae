"""Errors as Anthropic's API words them: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from aegis.core.errors import UserError

PATHS = "/v1/messages"
"""What the paths of that API begin with."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetail(Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(Struct, frozen=True):
    error: AnthropicErrorDetail
    request_id: str
    type: Literal["error"] = field(default="error")


def anthropic_error(error: UserError, request_id: str) -> AnthropicErrorBody:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return AnthropicErrorBody(AnthropicErrorDetail(kind, error.message), request_id)


def is_anthropic(path: str) -> bool:
    return path == PATHS or path.startswith(PATHS + "/")
