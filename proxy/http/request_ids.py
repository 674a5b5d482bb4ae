"""Every request has an id: the client's `X-Request-Id`, which something before us may have set, else its `request_id`,
else a random one. It comes back as `X-Request-Id`, stands in the reply's `id` and in the log."""

from __future__ import annotations

from os import urandom

from fastapi import Request
from starlette.types import Scope

from aegis.core.errors import UserError

HEADER = b"x-request-id"
_CHARACTERS_MAX = 128


def is_request_id(value: str) -> bool:
    """Whether it may stand in a header and in a log line."""
    return 0 < len(value) <= _CHARACTERS_MAX and value.isascii() and value.isprintable() and " " not in value


def new_id() -> str:
    return urandom(16).hex()


def assign(scope: Scope) -> None:
    """Gives the request its id, before anything else is known of it."""
    state = scope.setdefault("state", {})
    sent = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER), "")
    state["request_id_known"] = is_request_id(sent)
    state["request_id"] = sent if state["request_id_known"] else new_id()
    state["request_id_refused"] = bool(sent) and not state["request_id_known"]


def id_of(scope: Scope) -> str:
    request_id: str = scope["state"]["request_id"]
    return request_id


def request_id_for(request: Request, in_body: str | None) -> str:
    """The request's id, once its body is known. Raises UserError if the header holds what cannot be one: a retry
    with it would be another request."""
    if request.state.request_id_refused:
        message = f"'X-Request-Id' must be 1 to {_CHARACTERS_MAX} printable ASCII characters without spaces"
        raise UserError(message, param="X-Request-Id")
    if in_body is not None and not request.state.request_id_known:
        request.state.request_id, request.state.request_id_known = in_body, True
    return id_of(request.scope)


def is_new(request: Request) -> bool:
    """Whether nobody knows its id yet: it was made here, and nothing has been told of it."""
    return not request.state.request_id_known


def make_known(request: Request) -> None:
    """Somebody knows the request's id from now on, so that it is not new any more."""
    request.state.request_id_known = True
