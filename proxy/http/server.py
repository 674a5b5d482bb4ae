"""The settings with which uvicorn runs the application."""

from __future__ import annotations

from functools import partial

import uvicorn
from starlette.types import ASGIApp

from proxy.http.security.http_protocol import Connections, Protocol


def make_server(
    app: ASGIApp, *, host: str, port: int, shutdown_s: float = 30, together: Connections | None = None
) -> uvicorn.Server:
    """A server that is not running yet: `await server.serve(sockets)`, end it with `server.should_exit = True`.

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
        backlog=4096,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=shutdown_s,  # type: ignore[arg-type]  # any number of seconds will do
    )
    return uvicorn.Server(config)
