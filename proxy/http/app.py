"""The HTTP application: every route, and what surrounds them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

import aegis
from proxy.http import admin, chat, completions, errors, history, memory, models, status, tokens, unsupported
from proxy.http.boundary import Market
from proxy.http.edge import Edge
from proxy.http.settings import Settings


def create_app(market: Market, settings: Settings | None = None) -> ASGIApp:
    """The ASGI application that serves `market`."""
    app = FastAPI(title="Aegis", version=aegis.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.market = market
    app.state.settings = settings or Settings()
    for part in (completions, chat, models, admin, memory, history, tokens, status, unsupported):
        app.include_router(part.router)
    errors.install(app)
    return Edge(app, app.state.settings.proxy)
