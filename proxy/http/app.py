"""The HTTP application: every route, and what surrounds them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

import aegis
from proxy.http import admin, chat, completions, errors, history, memory, models, status, tokens, unsupported
from proxy.http.boundary import Market
from proxy.http.edge import Edge
from proxy.http.records import NoRecords, Records
from proxy.http.settings import Settings


def create_app(market: Market, settings: Settings | None = None, records: Records | None = None) -> ASGIApp:
    """The ASGI application that serves `market`. Without `records` a retry is a new request."""
    app = FastAPI(title="Aegis", version=aegis.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.market = market
    app.state.settings = settings or Settings()
    app.state.records = records or NoRecords()
    for part in (completions, chat, models, admin, memory, history, tokens, status, unsupported):
        app.include_router(part.router)
    errors.install(app)
    return Edge(app, app.state.settings.proxy)
