"""The HTTP application: every route, and what surrounds them."""

from __future__ import annotations

from asyncio import Lock

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

import aegis
from aegis.engine.grammar.trials import GrammarTrials
from proxy.http import dashboard, direct_routes, errors, openapi
from proxy.http.admin import adapters, history, memory, model_admin, status
from proxy.http.anthropic import messages
from proxy.http.call_records import NoRecords, Records
from proxy.http.market import Market
from proxy.http.openai import chat, completions, embeddings, models, rerank, tokenize, unsupported
from proxy.http.request.text_workers import TextWorkers
from proxy.http.request_middleware import RequestMiddleware
from proxy.http.responses import responses
from proxy.http.responses.background import BackgroundResponses
from proxy.http.responses.running_responses import RunningResponses
from proxy.http.responses.stored_responses import ResponseMemory, ResponseStore
from proxy.http.scrapes import Scrapes
from proxy.http.security.key_guard import Guard
from proxy.http.security.large_bodies import LargeBodies
from proxy.http.settings import Settings
from proxy.http.streaming.keep_alive import KeepAlive


class _LineFeeds(BaseRoute):
    """Paths that end with one are no paths here: the patterns of routes, which end with `$`, let it pass."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.FULL if scope["path"].endswith("\n") else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(404)


def create_app(
    market: Market,
    settings: Settings | None = None,
    records: Records | None = None,
    trials: GrammarTrials | None = None,
    texts: TextWorkers | None = None,
    kept: ResponseStore | None = None,
    running: RunningResponses | None = None,
) -> ASGIApp:
    """The ASGI application that serves `market`. Without `records` a retry is a new request; without `kept` it keeps
    responses in its own memory. `trials`, `texts` and the responses that are `running` are shared with others where
    they are given."""
    app = FastAPI(title="Aegis", version=aegis.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.market = market
    app.state.settings = settings or Settings()
    app.state.keep_alive = KeepAlive(app.state.settings.keep_alive_s, app.state.settings.reader_timeout_s)
    app.state.large_bodies = LargeBodies(app.state.settings.body_bytes_max)
    app.state.answer_turns = Lock()
    app.state.scrapes = Scrapes()
    app.state.records = records or NoRecords()
    app.state.responses = kept or ResponseMemory(app.state.settings.responses_ttl_s)
    app.state.background = BackgroundResponses()
    app.state.running_responses = running or RunningResponses()
    app.state.trials = trials or GrammarTrials()
    app.state.texts = texts or TextWorkers()
    busy = (
        chat.router,
        completions.router,
        messages.router,
        responses.router,
        embeddings.router,
        rerank.router,
    )
    others = tuple(
        part.router
        for part in (models, model_admin, adapters, memory, history, dashboard, tokenize, status, unsupported)
    )
    app.router.routes.insert(0, _LineFeeds())
    for router in busy:
        direct_routes.include(app, router)
    for router in others:
        app.include_router(router)
    errors.install(app)
    openapi.install(app, busy + others)
    return RequestMiddleware(_guarded(app, market, app.state.settings), app.state.settings.proxy, market.answered)


def _guarded(app: ASGIApp, market: Market, settings: Settings) -> ASGIApp:
    guarded: ASGIApp = Guard(app, market, status_needs_key=settings.status_needs_key)
    if settings.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["request-id", "retry-after", "x-aegis-ignored", "x-request-id"],
        )
    return guarded
