"""Routes that many requests a second take: their endpoints read the request and make the response themselves.

What FastAPI would do between them and the router, for dependencies, parameters and models of bodies, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute


class DirectRoute(APIRoute):
    """A route whose endpoint takes the request and nothing else, so that FastAPI has nothing to resolve."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


def direct_router() -> APIRouter:
    """One whose routes `include` takes."""
    return APIRouter(route_class=DirectRoute)


def include(app: FastAPI, router: APIRouter) -> None:
    """The routes themselves become the application's: `include_router` would wrap each of them once more."""
    app.router.routes.extend(router.routes)
