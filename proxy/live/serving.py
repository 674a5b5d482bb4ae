"""The HTTP server of a proxy, its work and its orderly end, in a process of its own or beside a node."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from aegis.config.config import Config
from aegis.metadata.store import Store
from aegis.process.tasks import cancelled, watched
from proxy.http.app import create_app
from proxy.http.request.text_workers import TextWorkers
from proxy.http.responses.stored_responses import NodeResponses
from proxy.http.security.http_protocol import Connections, Protocol
from proxy.http.settings import Settings, TlsFiles
from proxy.live.certificate import Certificate
from proxy.live.proxy import Proxy

ACCEPTED_AT_ONCE = 16
"""Connections that are accepted in one turn of the event loop. More would keep open connections waiting; fewer let a
new one wait behind those of a client that connects more often than the loop turns."""

CLOSE_S = 0.5  # that replies are given when the server is ended, besides what their requests are


def http_settings(config: Config) -> Settings:
    server = config.server
    return Settings(
        host=server.host,
        status_needs_key=server.status_needs_key,
        cors_origins=server.cors_origins,
        body_bytes_max=server.body_max,
        reader_timeout_s=server.reader_timeout_s,
        logs_prompts=server.log_prompts,
        responses_ttl_s=config.redis.responses_ttl_s,
        pace=server.pace,
        tls=TlsFiles(server.ssl_certfile, server.ssl_keyfile or "") if server.ssl_certfile else None,
    )


def http_server(proxy: Proxy, listener: socket.socket, store: Store | None, settings: Settings) -> uvicorn.Server:
    """Not running yet. Without a store a retry is a new request. Signals are left to whoever runs it.

    Raises UserError for a certificate that cannot be used."""
    certificate = Certificate(settings.tls) if settings.tls else None
    texts = TextWorkers()
    watched(texts.start())
    server = make_server(
        create_app(
            proxy,
            settings,
            store.records if store else None,
            texts=texts,
            kept=store.responses if store else NodeResponses(proxy.queries),
            running=proxy.running_responses,
        ),
        host=listener.getsockname()[0],
        port=listener.getsockname()[1],
        shutdown_s=CLOSE_S,
        tls=certificate.context if certificate else None,
    )
    if certificate:
        watched(certificate.watch())
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    return server


def acceptors(listener: socket.socket) -> list[socket.socket]:
    """The sockets of `uvicorn.Server.serve`, which closes them: duplicates that accept from the same queue, because
    libuv accepts one connection with each in a turn of the loop, whatever waits (its `uv__server_io`)."""
    return [listener, *(listener.dup() for _ in range(ACCEPTED_AT_ONCE - 1))]


def make_server(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    shutdown_s: float = 30,
    together: Connections | None = None,
    tls: ssl.SSLContext | None = None,
) -> uvicorn.Server:
    """A server that is not running yet: `await server.serve(acceptors(listener))`; `server.should_exit = True` ends it.

    `together`: what its connections may hold. Requests are logged by the application, so uvicorn's own access log is
    off; logging is configured by whoever runs this.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=partial(Protocol, together=together or Connections()),  # type: ignore[arg-type]  # is called only
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=2048,  # more wait for longer than a client takes to try again
        timeout_keep_alive=75,
        timeout_graceful_shutdown=shutdown_s,  # type: ignore[arg-type]  # any number of seconds will do
    )
    config.load()
    config.ssl = tls
    return uvicorn.Server(config)


async def drained(proxy: Proxy, stop: asyncio.Event, *, within_s: float) -> None:
    """Running requests get a moment to finish in; when it is over, or stop is set, the rest is failed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while proxy.busy and not stop.is_set():
                await asyncio.sleep(0.02)
    proxy.abandon()


@asynccontextmanager
async def running(*works: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """While the block is. Raises what one of them was stopped by, when all have ended."""
    tasks = [watched(work) for work in works]
    try:
        yield
    finally:
        await cancelled(*tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()):
            raise error
