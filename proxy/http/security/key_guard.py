"""The guard that lets no request in without an API key if there are any keys, or were."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from aegis.core.api_keys import ANYONE, Caller
from aegis.core.errors import UserError
from proxy.http.errors import error_reply
from proxy.http.market import Market
from proxy.http.request_notes import note, note_refusal

STATUS = frozenset({"/health", "/metrics", "/ready", "/version"})
"""Paths that need no key, unless the configuration says that they do."""

_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})

ROOT, PAGE = "/", "/dashboard"
"""Paths that are open to all: a browser sends no key with an address that is typed in, and these files say nothing
about this server."""

ADMIN = ("/debug/", "/models/")
"""Paths whose routes check by themselves who may command the server (`authorise`)."""


class Guard:
    """ASGI middleware: tells every request its caller, by the keys that the market has when it comes."""

    def __init__(self, app: ASGIApp, market: Market, *, status_needs_key: bool = False) -> None:
        self._app = app
        self._market = market
        self._open = frozenset() if status_needs_key else STATUS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = self._caller(scope)
            if caller is None:
                refusal = no_such_key("an API key", scope)
                note_refusal(scope, refusal)
                await error_reply(refusal, scope)(scope, receive, send)
                return
            scope["state"]["caller"] = caller
            if caller.name:
                note(scope, caller=caller.name)
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        keys = self._market.keys
        caller = next((found for key in _sent(scope) if (found := keys.find(key))), None)
        if caller or not keys.asks:
            return caller or ANYONE
        return ANYONE if self._is_open(scope["path"]) else None

    def _is_open(self, path: str) -> bool:
        return path in self._open or path in (ROOT, PAGE) or path.startswith((f"{PAGE}/", *ADMIN))


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def no_such_key(what: str, scope: Scope) -> UserError:
    """The error of a request that has no key, or none that is known."""
    unknown = "the key that was sent is not known here: " if any(_sent(scope)) else ""
    message = f"{unknown}send {what} as 'Authorization: Bearer …', or as 'x-api-key'"
    return UserError(message, status=401, code="invalid_api_key")


def _sent(scope: Scope) -> Iterator[str]:
    """The keys that the request has, the one of `Authorization` first; "" where it has none."""
    headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"]) if name in _KEY_HEADERS}
    kind, _, key = headers.get(b"authorization", "").partition(" ")
    yield key.strip() if kind.lower() == "bearer" else ""
    if b"x-api-key" in headers:
        yield headers[b"x-api-key"].strip()
