"""The outermost layer: it gives every request its id, logs one line of it, and confines a bug of ours to its request.
Each reply names its proxy in `X-Aegis-Proxy`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic_ns

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aegis.core.clock import NS_PER_MS
from aegis.core.errors import UserError
from aegis.core.request import Failure
from aegis.telemetry.logs import Value, log
from proxy.http.anthropic_errors import is_anthropic
from proxy.http.errors import error_reply
from proxy.http.request_ids import HEADER, assign, id_of
from proxy.http.request_notes import notes_of, refusal_of
from proxy.http.security import admission
from proxy.http.security.large_bodies import release

_logger = logging.getLogger(__name__)
_PROXY = b"x-aegis-proxy"
_NO_GUESSING = (b"x-content-type-options", b"nosniff")
"""A browser does not run what is told of requests as a script, whatever it looks like."""

_ENDING = UserError(
    "the server is shutting down; try another one", status=503, code=Failure.SHUTTING_DOWN, kind="server_error"
)
_QUIET = frozenset({"/debug/live", "/health", "/metrics", "/ready"})


class RequestMiddleware:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, proxy: str, answered: Callable[[str, int, str | None], None]) -> None:
        self._app = app
        self._proxy = proxy.encode()
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        assign(scope)
        began_ns = monotonic_ns()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (HEADER, id_of(scope).encode()),
                    (_PROXY, self._proxy),
                ]
                if scope["path"].startswith("/debug/"):
                    message["headers"].append(_NO_GUESSING)
                if is_anthropic(scope["path"]):
                    message["headers"].append((b"request-id", id_of(scope).encode()))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends, and has waited for the request as long as it may
            if not status:
                await error_reply(_ENDING, scope)(scope, receive, send_with_id)
        except Exception:  # noqa: BLE001 - the client was answered; the server goes on
            log(_logger, logging.ERROR, "request broke", {"request_id": id_of(scope)}, exc_info=True)
        release(scope)
        admission.end(scope)
        self._answered(getattr(scope.get("route"), "path", "other"), status, refusal_of(scope))
        level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
        log(_logger, level, "request", _line(scope, status, monotonic_ns() - began_ns))


def _line(scope: Scope, status: int, took_ns: int) -> dict[str, Value]:
    return {
        "request_id": id_of(scope),
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "took_ms": round(took_ns / NS_PER_MS, 1),
        **notes_of(scope),
    }
