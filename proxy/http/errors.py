"""Every reply that is not a success: `{"error": {"message", "type", "param", "code"}}`, one line, no stack."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from fastapi import FastAPI, Request, Response
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from aegis.core.errors import UserError
from proxy.http.anthropic_errors import anthropic_error, is_anthropic
from proxy.http.client_disconnect import ClientGone
from proxy.http.replies import json_reply
from proxy.http.request_ids import id_of
from proxy.http.request_notes import note_refusal

_SHOWN_CHARACTERS = 60
_CLIENT_GONE_STATUS = 499  # nginx's; only the log sees it
_RETRY_AFTER_S = {429: 1, 503: 1}


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    error: ErrorDetail


def shown(value: object) -> str:
    """A value as messages quote it: short, on one line."""
    text = _beginning(value, _SHOWN_CHARACTERS + 1)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _beginning(value: object, count: int) -> str:
    """So many characters of `repr(value)` at least, or all, but with JSON's words for None, True and False; little more
    is made, however large and deep it is."""
    if count <= 0:
        return ""
    if isinstance(value, str):
        return repr(value[:count])
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, list | dict):
        return repr(value)
    text, close = ("{", "}") if isinstance(value, dict) else ("[", "]")
    separator = ""
    for entry in value:
        text += separator + _beginning(entry, count - len(text))
        if isinstance(value, dict) and len(text) < count:
            text += ": " + _beginning(value[entry], count - len(text))
        if len(text) >= count:
            return text
        separator = ", "
    return text + close


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """Up to three known names like `name`, the best first, whatever their case; alike by `cutoff` at least, of 1."""
    by_fold = {candidate.casefold(): candidate for candidate in sorted(known)}
    matches = get_close_matches(name[:200].casefold(), by_fold, n=3, cutoff=cutoff)
    return [by_fold[match] for match in matches]


def error_body(error: UserError) -> ErrorBody:
    return ErrorBody(ErrorDetail(error.message, error.kind, error.param, error.code))


def error_reply(error: UserError, scope: Scope | None = None) -> Response:
    """The reply that tells the client of the error, in the form of the API that the request's path belongs to."""
    headers = {}
    if retry_s := error.retry_after_s or _RETRY_AFTER_S.get(error.status):
        headers["retry-after"] = str(retry_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body: Struct = error_body(error)
    if scope and is_anthropic(scope["path"]):
        body = anthropic_error(error, id_of(scope))
    return json_reply(body, error.status, headers)


def unexpected() -> UserError:
    """The error that a client gets for a bug of ours; the log has the rest."""
    return UserError("internal error; the server's log has it under this X-Request-Id", status=500, kind="server_error")


def _methods(request: Request, named: str) -> list[str]:
    """All that the path has (RFC 9110, 15.5.6): the router has `named` those of one route."""
    methods = set(filter(None, named.split(", ")))
    for route in request.app.router.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is Match.PARTIAL:
            methods |= route.methods or set()
    return sorted(methods)


def install(app: FastAPI) -> None:
    """Makes `app` answer UserError, the router's own refusals (no such path, wrong method) and bugs in this form."""

    async def user_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, UserError)
        note_refusal(request.scope, error)
        return error_reply(error, request.scope)

    async def routing_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = shown(request.scope["path"])  # `request.url` is put together from it and `Host`, and cut at a "?"
        message, code, headers = f"{request.method} {path}: {error.detail}", "no_such_route", dict(error.headers or {})
        if error.status_code == 405:
            methods = _methods(request, headers.get("Allow", ""))
            message, code = f"{message}; use {' or '.join(methods)}", "method_not_allowed"
            headers["Allow"] = ", ".join(methods)
        reply = error_reply(UserError(message, status=error.status_code, code=code), request.scope)
        reply.headers.update(headers)
        return reply

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_GONE_STATUS)

    async def too_deep(request: Request, error: Exception) -> Response:
        """Nothing here recurses but over what a client sent."""
        return error_reply(UserError("the body is nested too deeply", code="invalid_json"), request.scope)

    async def bug(request: Request, error: Exception) -> Response:
        return error_reply(unexpected(), request.scope)

    app.add_exception_handler(UserError, user_error)
    app.add_exception_handler(HTTPException, routing_error)
    app.add_exception_handler(ClientGone, client_gone)
    app.add_exception_handler(RecursionError, too_deep)
    app.add_exception_handler(Exception, bug)
