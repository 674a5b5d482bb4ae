"""Routes that many requests a second take: their endpoints read the request and make the response themselves.

What FastAPI would do between them and the router, for dependencies, parameters and models of bodies, is left out: each
call in between is memory that a waiting request holds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send


class DirectRoute(APIRoute):
    """A route whose endpoint takes the request and nothing else, so that FastAPI has nothing to resolve."""

    def __init__(self, path: str, endpoint: Callable[[Request], Awaitable[Response]], **settings: Any) -> None:
        super().__init__(path, endpoint, **settings)
        self.app = _answering(endpoint)


def _answering(endpoint: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    """Errors become replies further out, in the application's `ExceptionMiddleware`."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    return answer


def direct_router() -> APIRouter:
    """One whose routes `include` takes."""
    return APIRouter(route_class=DirectRoute)


def include(app: FastAPI, router: APIRouter) -> None:
    """The routes themselves become the application's: `include_router` would wrap each of them once more."""
    app.router.routes.extend(router.routes)
